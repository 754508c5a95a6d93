"""Sharding rules of operators that move elements, but compute nothing: views, slices, permutations, concatenations.

[Note: a view of a sharded dimension]

A view splits and merges dimensions in groups of equal size. The ranks' slices stay slices where the sharded dimension
is the first of those that are merged, or of those that it is split into. Merged behind others, it becomes a dimension
of blocks: (3, heads) seen as one dimension of 3 x heads has three blocks, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from echelon.parallel.auto_sharding.op_facts import OpFacts, OpStrategy, Rule, dim_states, linear_in_one, sharded
from echelon.parallel.auto_sharding.sharding import BROADCAST, PARTIAL, Sharding, shard

MAX_BLOCKS = 16


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of a shape and of its view in groups of equal size, as small as they can be."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [], []
        size_left = size_right = 1
        if i < len(before):
            left, size_left, i = [i], before[i], i + 1
        if j < len(after):
            right, size_right, j = [j], after[j], j + 1
        while size_left != size_right:
            if size_left < size_right and i < len(before):
                left.append(i)
                size_left, i = size_left * before[i], i + 1
            elif j < len(after):
                right.append(j)
                size_right, j = size_right * after[j], j + 1
            else:
                return []
        groups.append((left, right))
    return groups


def view(facts: OpFacts) -> Iterator[OpStrategy]:
    """See [Note: a view of a sharded dimension]."""
    if not is_reshape(facts):
        return
    before, after = facts.shape_of(0), facts.shape
    for left, right in view_groups(before, after):
        for source, target in _view_states(before, after, left, right, facts):
            yield sharded([source], target, facts)
    yield from linear_in_one(facts)


def is_reshape(facts: OpFacts) -> bool:
    """Whether a view changes the shape; another changes the dtype."""
    return isinstance(facts.arg(1), list | tuple)


def _view_states(
    before: Sequence[int], after: Sequence[int], left: Sequence[int], right: Sequence[int], facts: OpFacts
) -> Iterator[tuple[Sharding, Sharding]]:
    """States of the same elements on both sides of a group."""
    sides = []
    for shape, dims in ((before, left), (after, right)):
        states: dict[int, Sharding] = {}
        for position, dim in enumerate(dims):
            outer = math.prod(shape[other] for other in dims[:position])
            for blocks in _block_counts(shape[dim], facts):
                # A rank has a slice of each of `outer * blocks` runs of elements: equal numbers are equal slices.
                states.setdefault(outer * blocks, shard(dim, blocks))
        sides.append(states)
    for number, source in sides[0].items():
        target = sides[1].get(number)
        if target is not None and (1 in (source.blocks, target.blocks) or source.blocks == target.blocks <= 3):
            yield source, target


def _block_counts(size: int, facts: OpFacts) -> Iterator[int]:
    for blocks in range(1, MAX_BLOCKS + 1):
        if size % blocks == 0 and facts.divides(size, blocks):
            yield blocks


def _through(facts: OpFacts, dims: dict[int, int], keep: Sequence[int] = ()) -> Iterator[OpStrategy]:
    """Each dimension of the operand becomes one of the result; those of `keep` cannot be sharded."""
    for dim, state in dim_states(facts, facts.shape_of(0)):
        if dim in dims and dim not in keep:
            others = [BROADCAST] * (len(facts.operands) - 1)
            yield sharded([state, *others], shard(dims[dim]), facts)
            for blocks in (2, 3):
                if facts.divides(facts.shape_of(0)[dim], blocks) and facts.shape_of(0)[dim] == facts.shape[dims[dim]]:
                    yield sharded([shard(dim, blocks), *others], shard(dims[dim], blocks), facts)
    yield from linear_in_one(facts)


def permute(facts: OpFacts) -> Iterator[OpStrategy]:
    rank = len(facts.shape)
    if facts.op.op == "permute":
        order = [_normal(dim, rank) for dim in facts.arg(1, "dims")]
    else:
        order = list(range(rank))
        first, second = (0, rank - 1) if facts.op.op in ("t", "numpy_T", "mT") else (facts.arg(1), facts.arg(2))
        first, second = _normal(first, rank), _normal(second, rank)
        order[first], order[second] = order[second], order[first]
    yield from _through(facts, {dim: place for place, dim in enumerate(order)})


def unsqueeze(facts: OpFacts) -> Iterator[OpStrategy]:
    new = _normal(facts.arg(1, "dim"), len(facts.shape))
    rank = len(facts.shape_of(0))
    yield from _through(facts, {dim: dim + (dim >= new) for dim in range(rank)})


def squeeze(facts: OpFacts) -> Iterator[OpStrategy]:
    shape = facts.shape_of(0)
    given: Any = facts.arg(1, "dim", None)
    named = range(len(shape)) if given is None else given if isinstance(given, list | tuple) else [given]
    gone = {_normal(dim, len(shape)) for dim in named if shape[dim] == 1}
    left = [dim for dim in range(len(shape)) if dim not in gone]
    yield from _through(facts, {dim: place for place, dim in enumerate(left)})


def expand(facts: OpFacts) -> Iterator[OpStrategy]:
    """A dimension that is broadcast gets its slice from what every rank has."""
    before, after = facts.shape_of(0), facts.shape
    added = len(after) - len(before)
    for dim, state in dim_states(facts, after):
        own = dim - added
        is_kept = own >= 0 and before[own] == after[dim]
        yield sharded([shard(own) if is_kept else BROADCAST], state, facts)
    yield from linear_in_one(facts)


def along_one(facts: OpFacts) -> Iterator[OpStrategy]:
    """Slices, flips, rolls and the like along dimensions that stay whole."""
    rank = len(facts.shape_of(0))
    own = {_normal(dim, rank) for dim in _own_dims(facts)}
    yield from _through(facts, {dim: dim for dim in range(rank)}, keep=tuple(own))


def _own_dims(facts: OpFacts) -> list[int]:
    name = facts.op.op
    if name == "slice":
        return [facts.arg(1, "dim", 0)]
    if name == "flip":
        return list(facts.arg(1, "dims"))
    if name == "roll":
        return list(facts.arg(2, "dims", range(len(facts.shape))))
    if name in ("tril", "triu"):
        return [-1, -2]
    return list(range(len(facts.shape_of(0))))


def pad(facts: OpFacts) -> Iterator[OpStrategy]:
    """Along dimensions that stay whole. A partial sum would get a value other than zero from every rank."""
    rank, pads = len(facts.shape), facts.arg(1, "pad")
    value = facts.arg(3 if facts.op.op == "pad" else 2, "value", 0)
    own = {rank - 1 - index // 2 for index in range(len(pads))}
    for strategy in _through(facts, {dim: dim for dim in range(rank)}, keep=tuple(own)):
        if strategy.output != PARTIAL or not value:
            yield strategy


def broadcast_tensors(facts: OpFacts) -> Iterator[OpStrategy]:
    """Of equal shapes, which it changes nothing of."""
    if all(operand.shape == facts.shape for operand in facts.operands):
        for _dim, state in dim_states(facts, facts.shape):
            yield sharded([state] * len(facts.operands), state, facts)


def select(facts: OpFacts) -> Iterator[OpStrategy]:
    rank = len(facts.shape_of(0))
    own = _normal(facts.arg(1, "dim"), rank)
    yield from _through(facts, {dim: dim - (dim > own) for dim in range(rank) if dim != own})


def split(facts: OpFacts) -> Iterator[OpStrategy]:
    """Several results: parts of a whole dimension, or of one with a block for each."""
    shape = facts.shape_of(0)
    sizes: Any = facts.arg(1)
    own = _normal(facts.arg(2, "dim", 0), len(shape))
    yield from _through(facts, {dim: dim for dim in range(len(shape))}, keep=(own,))
    parts = num_equal_parts(sizes, shape[own])
    if parts and facts.divides(shape[own], parts):
        yield sharded([shard(own, parts)], shard(own), facts)


def num_equal_parts(sizes: Any, size: int) -> int:
    """How many equal parts a dimension is split into; 0 if they differ."""
    if isinstance(sizes, int):
        return size // sizes if size % sizes == 0 else 0
    return len(sizes) if len(set(sizes)) == 1 else 0


def unbind(facts: OpFacts) -> Iterator[OpStrategy]:
    own = _normal(facts.arg(1, "dim", 0), len(facts.shape_of(0)))
    rank = len(facts.shape_of(0))
    yield from _through(facts, {dim: dim - (dim > own) for dim in range(rank) if dim != own})


def concatenate(facts: OpFacts) -> Iterator[OpStrategy]:
    rank, count = len(facts.shape), len(facts.operands)
    own = _normal(facts.arg(1, "dim", 0), rank)
    adds = facts.op.op == "stack"
    for dim, state in dim_states(facts, facts.shape):
        if dim != own:
            yield sharded([shard(dim - (adds and dim > own))] * count, state, facts)
    yield OpStrategy((PARTIAL,) * count, PARTIAL)


def take(facts: OpFacts) -> Iterator[OpStrategy]:
    """One of several results, which may differ in size."""
    for dim, state in dim_states(facts, facts.shape):
        yield sharded([state], state, facts)
        for blocks in (2, 3):
            if facts.divides(facts.shape[dim], blocks):
                yield sharded([shard(dim, blocks)], shard(dim, blocks), facts)
    yield from linear_in_one(facts)


def scatter_slice(facts: OpFacts) -> Iterator[OpStrategy]:
    """select_scatter and slice_scatter: sharded where they write nothing of their own."""
    rank = len(facts.shape)
    is_select = facts.op.op == "select_scatter"
    own = _normal(facts.arg(2, "dim", 0), rank)
    for dim, state in dim_states(facts, facts.shape):
        if dim != own:
            yield sharded([state, shard(dim - (is_select and dim > own))], state, facts)
    yield OpStrategy((PARTIAL, PARTIAL), PARTIAL)


def repeat(facts: OpFacts) -> Iterator[OpStrategy]:
    before, added = facts.shape_of(0), len(facts.shape) - len(facts.shape_of(0))
    counts = facts.arg(1, "repeats")
    yield from _through(facts, {dim: dim + added for dim in range(len(before)) if counts[dim + added] == 1})


def _normal(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "unflatten", "flatten"), view),
    **dict.fromkeys(("permute", "transpose", "t", "mT", "numpy_T"), permute),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    **dict.fromkeys(("slice", "flip", "roll", "tril", "triu"), along_one),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    "broadcast_tensors": broadcast_tensors,
    "select": select,
    **dict.fromkeys(("split", "split_with_sizes"), split),
    "unbind": unbind,
    **dict.fromkeys(("cat", "stack"), concatenate),
    "getitem": take,
    **dict.fromkeys(("select_scatter", "slice_scatter"), scatter_slice),
    "repeat": repeat,
}
