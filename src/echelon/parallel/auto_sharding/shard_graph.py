"""Tensor parallelism of a traced module: the solver's strategies, executed. See docs/auto-sharding.md.

[Note: the machine that a split is chosen for]

A split is a property of the module and the number of ranks, so that `train`, `verify` and `plan` agree on it. It is
solved for one reference machine, an H100 with NVLink, and for a model as wide as those that need tensor parallelism:
FLOPs per byte of a link are scaled down with the widest GEMM below `REFERENCE_WIDTH`, or nothing of a small model would
be worth dividing. `plan` prices the split on the cluster that it is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import DimSplit, LogicalParam
from echelon.models.traced.graph_model import GraphModel, with_rows
from echelon.models.traced.graph_trace import UntraceableError
from echelon.models.traced.traced_graph import CALL, INPUT, PARAM, Segment, TracedGraph
from echelon.parallel.auto_sharding.divided_weights import divide_weights
from echelon.parallel.auto_sharding.op_rules import shardable_ops
from echelon.parallel.auto_sharding.sharded_runner import ShardedRunner
from echelon.parallel.auto_sharding.sharding import ShardableOp, Sharding, Strategy
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem, ShardingSolution
from echelon.parallel.auto_sharding.solve_sharding import solve
from echelon.parallel.auto_sharding.split_overrides import fixed_states
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.comm.first_rank import call_on_first_rank, first_different_rank
from echelon.rng import Dropout

if TYPE_CHECKING:
    from echelon.parallel.comm.mesh_axis import MeshAxis
    from echelon.parallel.transform_context import TransformContext

REFERENCE_WIDTH = 4096
FLOPS_RATE, LINK_BANDWIDTH, MEMORY_BANDWIDTH = 6e14, 3.5e11, 2.5e12
"""of the reference machine: FLOP/s of large GEMMs in bf16, bytes/s of NVLink and of device memory"""
LATENCY = 4e-6
"""of a collective; that of a narrow model is as small beside its GEMMs"""
TIME_LIMIT = 60.0
Overrides = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ModuleSplit:
    """How the ranks of tp share a traced module."""

    problem: ShardingProblem
    solution: ShardingSolution
    link: AxisLink

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        pairs = zip(self.problem.ops, self.solution.strategies, strict=True)
        return tuple(op.strategies[index] for op, index in pairs)

    @property
    def param_states(self) -> dict[str, Sharding]:
        """How each parameter lies, by name."""
        return {
            op.param: strategy.output
            for op, strategy in zip(self.problem.ops, self.strategies, strict=True)
            if op.param
        }

    def gemm_splits(self, *, column: str, row: str) -> dict[str, str]:
        """The modules whose GEMMs the ranks share, by columns or by rows."""
        splits: dict[str, str] = {}
        for op, strategy in zip(self.problem.ops, self.strategies, strict=True):
            if op.op not in ("linear", "conv1d", "conv2d", "conv3d") or strategy.compute_share == 1.0:
                continue
            if strategy.output.kind == "P":
                splits[op.name] = row
            elif strategy.inputs[1].kind == "S":
                splits[op.name] = column
        return splits


def reference_link(graph: TracedGraph, size: int) -> AxisLink:
    """See [Note: the machine that a split is chosen for]."""
    products = [op for op in graph.ops if op.kind == CALL and (op.op == "linear" or op.op.startswith("conv"))]
    widths = [math.prod(graph.ops[op.inputs[1]].shape[1:]) for op in products]
    scale = min(max(widths, default=REFERENCE_WIDTH) / REFERENCE_WIDTH, 1.0)
    return AxisLink(
        size=size,
        bandwidth=LINK_BANDWIDTH / scale,
        latency=LATENCY * scale**3,
        flops_rate=FLOPS_RATE,
        memory_bandwidth=MEMORY_BANDWIDTH / scale,
    )


Search = Callable[[ShardingProblem, AxisLink, Mapping[int, Sharding]], ShardingSolution]


def search(problem: ShardingProblem, link: AxisLink, fixed: Mapping[int, Sharding]) -> ShardingSolution:
    """The cheapest strategies. The same every time, unless the time limit ends the search."""
    return solve(problem, link, fixed=fixed, time_limit_s=TIME_LIMIT)


def split_module(
    model: GraphModel, size: int, *, sequence_parallel: bool = True, search: Search = search
) -> ModuleSplit:
    """Solve how `size` ranks share a module."""
    graph = model.example_graph()
    problem = _problem(model, graph, size, sequence_parallel=sequence_parallel, varying=_varying_dims(model, graph))
    link = reference_link(graph, size)
    solution = search(problem, link, fixed_states(problem, split_overrides(model)))
    return ModuleSplit(problem=problem, solution=solution, link=link)


def _problem(
    model: GraphModel,
    graph: TracedGraph,
    size: int,
    *,
    sequence_parallel: bool,
    varying: Mapping[int, tuple[int, ...]] | None = None,
) -> ShardingProblem:
    legal = shardable_ops(
        graph,
        size,
        dropouts=_dropouts(model.template),  # a pipeline stage has lost those of the others
        varying=varying,
        whole_between_layers=not sequence_parallel,
    )
    ops = divide_weights(graph, legal, split_overrides(model))
    return ShardingProblem(ops=ops, repeats=find_repeats(graph, ops))


def split_overrides(model: nn.Module) -> Overrides:
    """States that the model's attribute `split` gives to parameters and operators."""
    given: Overrides = getattr(model, "split", None) or {}
    return given


def _dropouts(model: nn.Module) -> frozenset[str]:
    """Modules of which a rank may run a part."""
    return frozenset(name for name, module in model.named_modules() if isinstance(module, Dropout | nn.Dropout))


def _varying_dims(model: GraphModel, graph: TracedGraph, *, training: bool = True) -> dict[int, tuple[int, ...]]:
    """Dimensions of each operator's result whose size depends on the number of rows of a batch."""
    shapes = {op.name: op.shape for op in graph.ops if op.kind == INPUT}
    given = {
        key: value.new_empty(shapes.get(key, value.shape)) if isinstance(value, Tensor) else value
        for key, value in model.example_inputs.items()
    }
    rows = next((len(value) for value in given.values() if isinstance(value, Tensor) and value.dim()), 0)
    more = with_rows(given, rows + 1)
    try:
        other = model.graph_of(more, training=training)
    except UntraceableError:
        return {}
    if other.signature() != graph.signature():
        return {}
    return {
        index: tuple(dim for dim, (a, b) in enumerate(zip(op.shape, twin.shape, strict=True)) if a != b)
        for index, (op, twin) in enumerate(zip(graph.ops, other.ops, strict=True))
    }


def find_repeats(graph: TracedGraph, ops: Sequence[ShardableOp]) -> dict[int, int]:
    """Operators of a layer that an earlier, equal layer has at the same place, with their parameters."""
    repeats: dict[int, int] = {}
    firsts: dict[Any, Segment] = {}
    readers = _readers(graph)
    for segment in graph.segments:
        if not segment.owner:
            continue
        key = tuple((ops[i].op, ops[i].shape, ops[i].strategies) for i in segment.ops)
        first = firsts.setdefault(key, segment)
        if first is segment:
            continue
        for index, earlier in zip(segment.ops, first.ops, strict=True):
            repeats[index] = earlier
            for mine, its in zip(graph.ops[index].inputs, graph.ops[earlier].inputs, strict=True):
                alike = ops[mine].strategies == ops[its].strategies and ops[mine].shape == ops[its].shape
                is_own = graph.ops[mine].kind == graph.ops[its].kind == PARAM and its < mine
                if is_own and alike and readers[mine] <= {segment.owner} and readers[its] <= {first.owner}:
                    repeats[mine] = its
    return repeats


def _readers(graph: TracedGraph) -> dict[int, set[str]]:
    """The layers that read each operator's result."""
    readers: dict[int, set[str]] = {index: set() for index in range(len(graph.ops))}
    for op in graph.ops:
        for index in op.inputs:
            readers[index].add(op.layer)
    for index in graph.output_refs:
        readers[index].add("")
    return readers


# -- the transform ----------------------------------------------------------------------------------------------------


def shard_graph_model(context: TransformContext, model: GraphModel) -> list[LogicalParam]:
    """Let the ranks of tp share a module, and return how its parameters lie."""
    axis, layout, device = context.axes["tp"], context.layout, context.options.device
    world = context.axes[WORLD_AXIS]

    def search_once(problem: ShardingProblem, link: AxisLink, fixed: Mapping[int, Sharding]) -> ShardingSolution:
        if (other := first_different_rank(problem.ops, world, device)) is not None:
            raise ValueError(
                f"ranks traced different graphs of {type(model).__name__} (ranks 0 and {other}); let its forward "
                "depend on its inputs alone, not on the rank"
            )
        return _search_on_first_rank(problem, link, fixed, world, device)

    split = split_module(model, axis.size, sequence_parallel=bool(layout.sp), search=search_once)
    model.make_runner = _runner_factory(model, split, axis, device, sequence_parallel=bool(layout.sp))
    model.runs_graph = True
    states = split.param_states
    return [_placed(param, states, axis.size) for param in context.params]


def _search_on_first_rank(
    problem: ShardingProblem,
    link: AxisLink,
    fixed: Mapping[int, Sharding],
    axis: MeshAxis,
    device: torch.device | None,
) -> ShardingSolution:
    """The first rank's solution: after the time limit, each rank could have found another."""
    return ShardingSolution.from_dict(call_on_first_rank(lambda: asdict(search(problem, link, fixed)), axis, device))


def _placed(param: LogicalParam, states: Mapping[str, Sharding], size: int) -> LogicalParam:
    state = next((states[name] for name in param.names if name in states), None)
    if state is None or state.kind == "R":
        return param
    if state.kind == "B":
        return replace(param, partial_grad_axes=("tp",))
    return replace(param, splits=(DimSplit(axis="tp", dim=state.dim, num_parts=size),))


def _runner_factory(
    model: GraphModel, split: ModuleSplit, axis: MeshAxis, device: torch.device | None, *, sequence_parallel: bool
) -> Callable[[TracedGraph], ShardedRunner]:
    """Make the runner of each graph: by the strategies of the example's, or by new ones for its own sizes."""
    names = [op.name for op in split.problem.ops]

    def make(graph: TracedGraph) -> ShardedRunner:
        problem = _problem(model, graph, axis.size, sequence_parallel=sequence_parallel)
        chosen = split.strategies
        is_same = [op.name for op in problem.ops] == names
        if not is_same or any(strategy not in op.strategies for op, strategy in zip(problem.ops, chosen, strict=True)):
            varying = _varying_dims(model, graph, training=model.training)
            problem = _problem(model, graph, axis.size, sequence_parallel=sequence_parallel, varying=varying)
            states = split.param_states
            fixed = {i: states[op.param] for i, op in enumerate(problem.ops) if op.param in states}
            solved = _search_on_first_rank(problem, split.link, fixed, axis, device)
            chosen = tuple(op.strategies[index] for op, index in zip(problem.ops, solved.strategies, strict=True))
        return ShardedRunner(graph, chosen, axis)

    return make
