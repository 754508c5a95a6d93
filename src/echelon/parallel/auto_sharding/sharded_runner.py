"""Runs a traced graph on the ranks of an axis, each operator by its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from echelon.models.traced.graph_model import OpRunner
from echelon.models.traced.traced_graph import CALL, MODULE, TracedGraph, replace_refs
from echelon.parallel.auto_sharding.local_ops import LocalCall, dropout_window, local_call
from echelon.parallel.auto_sharding.op_facts import OpFacts, tensor_refs
from echelon.parallel.auto_sharding.shard_conversion import convert
from echelon.parallel.auto_sharding.sharding import REPLICATE, Sharding, Strategy
from echelon.parallel.comm.mesh_axis import MeshAxis


class ShardedRunner(OpRunner):
    """One rank's part of every operator; a conversion of one result to one state happens once in a segment."""

    def __init__(self, graph: TracedGraph, strategies: Sequence[Strategy], axis: MeshAxis):
        super().__init__(graph)
        self.strategies, self.axis = strategies, axis
        self._calls: dict[int, LocalCall] = {}
        for index, op in enumerate(graph.ops):
            if op.kind == CALL:
                operands = tuple(graph.ops[ref.index] for ref in tensor_refs((op.args, dict(op.kwargs))))
                self._calls[index] = local_call(OpFacts(op, operands, axis.size), strategies[index], axis)

    def run(self, index: int, read: Callable[[int], Any], model: nn.Module, cache: dict[Any, Any]) -> Any:
        op, strategy = self.graph.ops[index], self.strategies[index]
        wanted = dict(zip(op.inputs, strategy.inputs, strict=True))
        if op.op == "getitem":  # of several results, which may differ in size, only this one moves
            return self._convert(op.inputs[0], read(op.inputs[0])[op.args[1]], strategy.output)

        def converted(source: int) -> Any:
            key = (source, wanted[source])
            if key not in cache:
                cache[key] = self._convert(source, read(source), wanted[source])
            return cache[key]

        args, kwargs = replace_refs((op.args, dict(op.kwargs)), converted)
        if op.kind == MODULE:
            site: Any = model.get_submodule(str(op.target))
            if hasattr(site, "window"):
                site.window = dropout_window(op, strategy.output, self.axis)
            return self.call_module(index, args[0], model)
        return self._calls[index](*args, **kwargs)

    def finish(self, index: int, value: Any) -> Any:
        return self._convert(index, value, REPLICATE)

    def _convert(self, index: int, value: Any, target: Sharding) -> Any:
        return convert(value, self.strategies[index].output, target, self.axis)
