"""Traced modules on ranks that are threads, each operator by a strategy that is drawn at random or solved for.

A draw takes any legal strategy of each operator, sharded ones first: what a solver would never choose is run, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from thread_ranks import run_on_threads
from torch import Tensor, nn

from echelon.models.traced.graph_model import make_traceable
from echelon.models.traced.traced_graph import MODULE, PARAM, TracedGraph
from echelon.parallel.auto_sharding.op_rules import shardable_ops
from echelon.parallel.auto_sharding.shard_conversion import local_shape, own_slice
from echelon.parallel.auto_sharding.sharded_runner import ShardedRunner
from echelon.parallel.auto_sharding.sharding import REPLICATE, ShardableOp, Sharding, Strategy, conversion
from echelon.rng import Dropout, RandomStream, attach_stream

WHOLE_SHARE = 0.1
"""of operators, those that may run whole; more where a draw ends in states that nothing can read"""
DRAWS = 200


@dataclass
class Coverage:
    """What the ranks of all draws have executed."""

    conversions: set[tuple[str, str]] = field(default_factory=set)
    """kinds of states, as (R, B); of two shards also whether the dimension stays"""
    operators: set[str] = field(default_factory=set)
    """that ran sharded, or on a partial sum"""


class CheckedRunner(ShardedRunner):
    """Notes what it executes, and checks the size of every local result."""

    def __init__(self, graph: TracedGraph, strategies: Sequence[Strategy], axis: Any, coverage: Coverage):
        super().__init__(graph, strategies, axis)
        self.coverage = coverage

    def run(self, index: int, read: Callable[[int], Any], model: nn.Module, cache: dict[Any, Any]) -> Any:
        result = super().run(index, read, model, cache)
        op, strategy = self.graph.ops[index], self.strategies[index]
        if isinstance(result, Tensor):
            assert tuple(result.shape) == local_shape(op.shape, strategy.output, self.axis.size), (op.name, strategy)
        if any(state.kind in "SP" for state in strategy.inputs):
            self.coverage.operators.add(op.op)
        return result

    def _convert(self, index: int, value: Any, target: Sharding) -> Any:
        source = self.strategies[index].output
        if source != target:
            same = "=" if source.kind == "S" and source.dim == target.dim else ""
            self.coverage.conversions.add((source.kind, same + target.kind))
        return super()._convert(index, value, target)


@dataclass
class StepResult:
    """What one step gives: the outputs, the gradient of each parameter, and the buffers behind it."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    issued: tuple[str, ...] = ()
    """collectives of a rank"""


@dataclass
class TracedCase:
    """A module, a batch, and the graph of a forward of it."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    coverage: Coverage = field(default_factory=Coverage)

    @cached_property
    def traced(self) -> Any:
        """What derives a split of the module."""
        return make_traceable(copy.deepcopy(self.model), self.inputs)

    @cached_property
    def graph(self) -> TracedGraph:
        graph: TracedGraph = self.traced.graph_of(self.inputs, training=True)
        return graph

    @cached_property
    def truth(self) -> StepResult:
        """The module as it was written."""
        return step(self.ready(), self.inputs)

    def ready(self) -> nn.Module:
        """A copy whose dropouts draw by counters."""
        model = copy.deepcopy(self.model)
        stream = RandomStream(7)
        stream.samples = torch.arange(len(next(iter(self.inputs.values()))))
        attach_stream(model, stream)
        return model

    def ops(self, size: int) -> tuple[ShardableOp, ...]:
        """With the strategies of `size` ranks. A dropout draws by rows, which stay whole."""
        rows = {index: (0,) for index, op in enumerate(self.graph.ops) if op.kind == MODULE}
        dropouts = {name for name, module in self.model.named_modules() if isinstance(module, nn.Dropout | Dropout)}
        return shardable_ops(self.graph, size, dropouts=dropouts, varying=rows)

    def draw(self, size: int, seed: int) -> list[Strategy]:
        """Legal strategies of all operators."""
        ops, numbers = self.ops(size), random.Random(seed)
        for number in range(DRAWS):
            if (found := _draw(ops, numbers, WHOLE_SHARE + number / DRAWS)) is not None:
                return found
        raise AssertionError(f"no legal assignment in {DRAWS} draws")

    def run(self, strategies: Sequence[Strategy], size: int, dropped: str = "") -> list[StepResult]:
        """A step on each rank."""
        states = self.param_states(strategies)

        def rank(axis: Any) -> StepResult:
            model = make_traceable(self.ready(), self.inputs)
            model.graph_of = lambda inputs, training: self.graph
            model.make_runner = lambda graph: CheckedRunner(graph, strategies, axis, self.coverage)
            model.runs_graph = True
            keep_slices(model, states, axis)
            result = step(model, self.inputs)
            result.issued = tuple(axis.issued)
            return result

        return run_on_threads(size, rank, dropped)

    def param_states(self, strategies: Sequence[Strategy]) -> dict[str, Sharding]:
        ops = zip(self.graph.ops, strategies, strict=False)
        return {str(op.target): strategy.output for op, strategy in ops if op.kind == PARAM}

    def error(self, strategies: Sequence[Strategy], ranks: Sequence[StepResult]) -> float:
        """The largest difference of any rank to the module."""
        return max(self.errors(strategies, ranks).values())

    def errors(self, strategies: Sequence[Strategy], ranks: Sequence[StepResult]) -> dict[str, float]:
        """The differences of outputs, gradients and buffers, by name."""
        states, errors = self.param_states(strategies), {"": 0.0}

        def note(name: str, a: Tensor, b: Tensor, full: Tensor) -> None:
            errors[name] = max(difference(a, b, full), errors.get(name, 0.0))

        for name, full in self.truth.gradients.items():
            state, held = states.get(name), [rank.gradients[name] for rank in ranks]
            if state is None:
                continue
            if state.kind == "B":
                note(name, sum(held, torch.zeros_like(full)), full, full)
                continue
            for index, local in enumerate(held):
                note(name, local, slice_of(full, state, index, len(ranks)), full)
        for rank in ranks:
            for number, (a, b) in enumerate(zip(rank.outputs, self.truth.outputs, strict=True)):
                note(f"output {number}", a, b, b)
            for name, b in self.truth.buffers.items():
                note(name, rank.buffers[name], b, b)
        return errors


def _draw(ops: Sequence[ShardableOp], numbers: random.Random, whole_share: float) -> list[Strategy] | None:
    chosen: list[Strategy] = []
    for op in ops:
        legal = [
            strategy
            for strategy in op.strategies
            if all(conversion(chosen[i].output, s) for i, s in zip(op.inputs, strategy.inputs, strict=True))
        ]
        if not legal:
            return None
        divided = [s for s in legal if any(state.kind in "SP" for state in (*s.inputs, s.output))]
        whole = [s for s in legal if s.output == REPLICATE and s not in divided]
        chosen.append(numbers.choice((numbers.random() < whole_share and whole) or divided or legal))
    return chosen


def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> StepResult:
    """Forward, and backward from all that has a gradient, each element of which counts differently."""
    outputs = model(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [out for out in outputs if out.requires_grad]
    torch.autograd.backward(
        differentiable, [torch.arange(out.numel()).cos().to(out.dtype).view_as(out) for out in differentiable]
    )
    gradients = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return StepResult(tuple(out.detach() for out in outputs), gradients, dict(model.named_buffers()))


def keep_slices(model: nn.Module, states: Mapping[str, Sharding], axis: Any) -> None:
    """Leave a rank its slice of each sharded parameter, under all its names."""
    sliced: dict[int, nn.Parameter] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if (state := states.get(name)) is not None and state.kind == "S":
            sliced[id(parameter)] = nn.Parameter(
                own_slice(parameter.detach(), state, axis), requires_grad=parameter.requires_grad
            )
    for name, parameter in named:
        owner, _, attribute = name.rpartition(".")
        if id(parameter) in sliced:
            model.get_submodule(owner)._parameters[attribute] = sliced[id(parameter)]


@dataclass
class Place:
    index: int
    size: int


def slice_of(full: Tensor, state: Sharding, index: int, size: int) -> Tensor:
    return own_slice(full, state, Place(index, size)) if state.kind == "S" else full  # type: ignore[arg-type]


def difference(a: Tensor, b: Tensor, full: Tensor) -> float:
    """The largest error, relative to the largest value of the full tensor above one."""
    assert a.shape == b.shape
    if not a.numel():
        return 0.0
    a, b, full = (torch.view_as_real(t) if t.is_complex() else t.detach().double() for t in (a, b, full))
    found = float((a - b).abs().max()) / max(1.0, float(full.abs().max()))
    return found if found == found else float("inf")
