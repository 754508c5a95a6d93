"""Weights that tensor parallelism divides, and leaves where they lie.

By time alone the solver may let every rank hold a weight, or gather its slices for the tokens of the rank: that is data
parallelism, ZeRO-3 and their kin, which a layout asks for by `dp` and `zero`. Whoever asks for tp wants the weights in
parts. So what GEMMs, convolutions and lookups read of a large weight is a slice, and no collective makes it whole. An
override of a weight lifts the rule for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from echelon.models.traced.traced_graph import PARAM, TracedGraph
from echelon.parallel.auto_sharding.sharding import ShardableOp, Strategy

READERS = frozenset(("linear", "embedding", "matmul", "mm", "bmm", "addmm", "einsum", "conv1d", "conv2d", "conv3d"))
SMALLEST_SHARE = 1 / 64
"""of the largest weight's elements: a weight with fewer is left to the solver"""


def divide_weights(
    graph: TracedGraph, ops: Sequence[ShardableOp], overridden: Collection[str] = ()
) -> tuple[ShardableOp, ...]:
    """Keep only the strategies by which large weights lie, and are read, in slices, where there are such.

    `overridden` are patterns of parameters that the rule leaves alone.
    """
    result = list(ops)
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for source in op.inputs:
            readers.setdefault(source, []).append(index)
    weights = [i for i, op in enumerate(graph.ops) if op.kind == PARAM and len(op.shape) > 1 and i in readers]
    largest = max((math.prod(graph.ops[i].shape) for i in weights), default=0)
    for index in weights:
        is_free = any(fnmatchcase(ops[index].param, pattern) for pattern in overridden)
        if is_free or math.prod(graph.ops[index].shape) < largest * SMALLEST_SHARE:
            continue
        _divide(result, index, readers[index])
    return tuple(result)


def _divide(ops: list[ShardableOp], weight: int, readers: Sequence[int]) -> None:
    """Leave only slices of one weight, if everything that reads it can."""
    lying = tuple(strategy for strategy in ops[weight].strategies if strategy.output.kind == "S")
    reading = {reader: _by_slices(ops[reader], weight) for reader in readers if ops[reader].op in READERS}
    if not lying or len(reading) < len(readers) or not all(reading.values()):
        return
    ops[weight] = replace(ops[weight], strategies=lying)
    for reader, strategies in reading.items():
        ops[reader] = replace(ops[reader], strategies=strategies)


def _by_slices(op: ShardableOp, weight: int) -> tuple[Strategy, ...]:
    slot = op.inputs.index(weight)
    return tuple(strategy for strategy in op.strategies if strategy.inputs[slot].kind == "S")
