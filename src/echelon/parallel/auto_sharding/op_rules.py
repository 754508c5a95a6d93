"""The legal strategies of every operator of a traced graph, as the solver wants them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from echelon.models.traced.traced_graph import CALL, MODULE, PARAM, TracedGraph, TracedOp
from echelon.parallel.auto_sharding import elementwise_rules, gemm_rules, shape_rules
from echelon.parallel.auto_sharding.op_facts import (
    OpFacts,
    OpStrategy,
    Rule,
    join_operands,
    linear_in_one,
    tensor_refs,
    whole_strategies,
)
from echelon.parallel.auto_sharding.sharding import BROADCAST, REPLICATE, ShardableOp, Sharding, Strategy, shard

RULES: dict[str, Rule] = {**elementwise_rules.RULES, **shape_rules.RULES, **gemm_rules.RULES}
GEMMS = frozenset(
    ("linear", "matmul", "mm", "bmm", "einsum", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")
)
UPDATE_BYTES = 28.0
"""read and written for each element by AdamW in float32: gradient, weight and two moments"""
MOVES = frozenset((*shape_rules.RULES, "alias", "detach"))
"""operators that compute nothing"""


def shardable_ops(
    graph: TracedGraph,
    num_ranks: int,
    *,
    dropouts: Collection[str] = (),
    varying: Mapping[int, Collection[int]] | None = None,
    whole_between_layers: bool = False,
) -> tuple[ShardableOp, ...]:
    """The operators of a graph with their legal strategies, and last the operator `output`.

    `dropouts` are modules of which a rank may run a part. Dimensions that are `varying` with the number of rows of a
    batch stay whole: sharding those is data parallelism's. With `whole_between_layers`, so does all that one segment
    hands to another.
    """
    varying = varying or {}
    between = {index for segment in graph.segments for index in segment.gives} if whole_between_layers else set()
    filters = _filters(graph)
    ops = [
        _shardable(graph, index, num_ranks, dropouts, varying, is_whole=index in between, is_filter=index in filters)
        for index in range(len(graph.ops))
    ]
    outputs = graph.output_refs
    ops.append(
        ShardableOp(
            name="output",
            op="output",
            inputs=outputs,
            strategies=(Strategy((REPLICATE,) * len(outputs), REPLICATE),),
            shape=(),
            element_bytes=0,
        )
    )
    return tuple(ops)


def _shardable(
    graph: TracedGraph,
    index: int,
    num_ranks: int,
    dropouts: Collection[str],
    varying: Mapping[int, Collection[int]],
    *,
    is_whole: bool,
    is_filter: bool,
) -> ShardableOp:
    op = graph.ops[index]
    if op.kind in (CALL, MODULE):
        operands = tuple(graph.ops[ref.index] for ref in tensor_refs((op.args, dict(op.kwargs))))
        facts = OpFacts(op, operands, num_ranks)
        candidates = (join_operands(facts, strategy) for strategy in _strategies(facts, dropouts))
        strategies = [strategy for strategy in candidates if strategy is not None]
    else:
        strategies = [
            Strategy((), state, 1 / num_ranks if state.kind == "S" else 1.0)
            for state in _entry_states(op, num_ranks, is_filter=is_filter)
        ]
    strategies = [s for s in dict.fromkeys(strategies) if _keeps_whole(graph, index, s, varying)]
    if is_whole and any(strategy.output == REPLICATE for strategy in strategies):
        strategies = [strategy for strategy in strategies if strategy.output == REPLICATE]
    flops = op_flops(op, [graph.ops[i] for i in op.inputs]) if op.kind == CALL else 0.0
    reads = sum(graph.ops[i].num_elements * graph.ops[i].dtype.itemsize for i in op.inputs)
    moves = _only_moves(op)
    return ShardableOp(
        name=op.name,
        op=op.op,
        inputs=op.inputs,
        strategies=tuple(strategies),
        # Several results are converted together.
        shape=op.shape if op.num_elements == math.prod(op.shape) else (op.num_elements,),
        element_bytes=op.dtype.itemsize,
        flops=flops,
        traffic_bytes=_traffic_bytes(op, reads),
        saved_bytes=0.0 if moves or not op.is_differentiable else op.num_elements * op.dtype.itemsize,
        param=str(op.target) if op.kind == PARAM else "",
    )


def _only_moves(op: TracedOp) -> bool:
    return op.op in MOVES or op.kind not in (CALL, MODULE)


def _traffic_bytes(op: TracedOp, read_bytes: float) -> float:
    """Bytes that an operator moves in forward; of a parameter, a third of those that its update moves in a step."""
    if op.kind == PARAM and op.is_differentiable:
        return op.num_elements * UPDATE_BYTES / 3
    return 0.0 if _only_moves(op) else read_bytes + op.num_elements * op.dtype.itemsize


def _strategies(facts: OpFacts, dropouts: Collection[str]) -> Iterator[OpStrategy]:
    if facts.op.kind == MODULE and facts.op.target not in dropouts:
        yield OpStrategy((REPLICATE,) * len(facts.operands), REPLICATE)
        return
    yield from whole_strategies(facts)
    if facts.op.kind == MODULE:
        # A mask is drawn for a sample, the first dimension, and a part of one is a slice of another dimension.
        for strategy in elementwise_rules.elementwise(facts):
            if strategy.output.kind != "S" or strategy.output.dim > 0:
                yield strategy
        yield from linear_in_one(facts)
    elif facts.operands and (rule := RULES.get(facts.op.op)) is not None:
        yield from rule(facts)


def _entry_states(op: TracedOp, num_ranks: int, *, is_filter: bool) -> Iterator[Sharding]:
    yield REPLICATE
    if op.kind != PARAM or not op.dtype.is_floating_point:
        return
    if op.is_differentiable:
        yield BROADCAST
    rank = len(op.shape)
    # What optimizers take for a matrix must be split into matrices (optim/matrix_shards.py).
    dims = (0, 1) if is_filter else sorted({0, rank - 2, rank - 1} & set(range(rank)))
    for dim in dims:
        if op.shape[dim] % num_ranks == 0 and op.shape[dim]:
            yield shard(dim)


def _filters(graph: TracedGraph) -> frozenset[int]:
    """Parameters that are filters of convolutions."""
    convolutions = (op for op in graph.ops if op.kind == CALL and op.op.startswith("conv"))
    return frozenset(op.inputs[1] for op in convolutions if len(op.inputs) > 1)


def _keeps_whole(graph: TracedGraph, index: int, strategy: Strategy, varying: Mapping[int, Collection[int]]) -> bool:
    """Whether no dimension that varies with the batch is sharded."""
    states = (*zip(graph.ops[index].inputs, strategy.inputs, strict=True), (index, strategy.output))
    return not any(state.kind == "S" and state.dim in varying.get(at, ()) for at, state in states)


def op_flops(op: TracedOp, inputs: Sequence[TracedOp]) -> float:
    """FLOPs of a GEMM, a convolution or an attention in forward."""
    if op.op not in GEMMS:
        return 0.0
    result = math.prod(op.shape)
    shapes = [each.shape for each in inputs]
    if op.op in ("linear", "matmul", "mm", "bmm"):
        return 2.0 * result * shapes[0][-1]
    if op.op == "scaled_dot_product_attention":
        return 2.0 * result * shapes[1][-2] * 2
    if op.op == "einsum":
        letters = dict(
            zip(
                "".join(str(op.args[0]).split("->")[0].replace(" ", "").split(",")),
                (size for shape in shapes for size in shape),
                strict=False,
            )
        )
        return 2.0 * math.prod(letters.values())
    return 2.0 * result * math.prod(shapes[1][1:])
