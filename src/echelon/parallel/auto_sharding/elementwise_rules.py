"""Sharding rules of operators that act on each element, along one dimension, or reduce some.

[Note: a sharded elementwise operator]

Every operand that has the sharded dimension is sharded there. One that is broadcast along it is read by every rank for
its own slice, so its gradient is a partial sum: it is `B`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from echelon.parallel.auto_sharding.op_facts import OpFacts, OpStrategy, Rule, dim_states, linear_in_one, sharded
from echelon.parallel.auto_sharding.sharding import BROADCAST, PARTIAL, Sharding, shard

_ELEMENTWISE = """
    abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
    bitwise_xor ceil celu clamp clamp_max clamp_min clone contiguous copy_of copysign cos cosh deg2rad detach div elu
    eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmod frac ge gelu gt hardsigmoid hardswish hardtanh
    hypot isfinite isinf isnan le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp logical_and
    logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg pow real
    reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink
    sqrt square sub tan tanh threshold to_copy _to_copy trunc type_as where xlogy lift_fresh_copy zeros_like
    ones_like empty_like full_like
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""operators whose result at a place depends on the operands at that place"""
LINEAR_UNARY = frozenset(["neg", "clone", "contiguous", "alias", "_to_copy", "to_copy", "type_as"])
ADDITIVE = frozenset(("add", "sub", "rsub"))


def _aligned(shape: Sequence[int], dim: int, rank: int) -> int | None:
    """The dimension of an operand at dimension `dim` of a result of `rank` dimensions; None if it is broadcast."""
    own = dim - (rank - len(shape))
    return own if own >= 0 and shape[own] != 1 else None


def elementwise(facts: OpFacts) -> Iterator[OpStrategy]:
    """See [Note: a sharded elementwise operator]."""
    for dim, state in dim_states(facts, facts.shape):
        yield sharded(_operand_states(facts, dim), state, facts)
        for blocks in _blocks(facts, dim):
            yield sharded(_operand_states(facts, dim, blocks), shard(dim, blocks), facts)
    yield from _of_partial_sums(facts)


def _blocks(facts: OpFacts, dim: int) -> Iterator[int]:
    """Blocks of a fused dimension that may pass through: a bias or an activation of gate and up, of q, k and v."""
    for blocks in (2, 3):
        if dim == len(facts.shape) - 1 and facts.divides(facts.shape[dim], blocks):
            yield blocks


def _operand_states(facts: OpFacts, dim: int, blocks: int = 1) -> list[Sharding]:
    rank = len(facts.shape)
    aligned = [_aligned(operand.shape, dim, rank) for operand in facts.operands]
    return [BROADCAST if own is None else shard(own, blocks) for own in aligned]


def _of_partial_sums(facts: OpFacts) -> Iterator[OpStrategy]:
    name, count = facts.op.op, len(facts.operands)
    if name in LINEAR_UNARY and count == 1 and facts.op.dtype.is_floating_point:
        yield from linear_in_one(facts)
    elif name in ADDITIVE and count == 2:
        yield OpStrategy((PARTIAL, PARTIAL), PARTIAL)
    elif name == "mul":
        for position in range(count):
            yield from linear_in_one(facts, position)
    elif name == "div" and facts.op.args and not facts.op.kwargs:
        yield from linear_in_one(facts)
    elif name == "where" and count == 3:
        yield OpStrategy((BROADCAST, PARTIAL, PARTIAL), PARTIAL)


def along_dim(facts: OpFacts) -> Iterator[OpStrategy]:
    """Operators along one dimension (softmax, cumsum): sharded on any other."""
    own = _normal(facts.arg(1, "dim", -1), len(facts.shape))
    for dim, state in dim_states(facts, facts.shape):
        if dim != own:
            yield sharded([shard(dim)], state, facts)
    if facts.op.op == "cumsum":
        yield from linear_in_one(facts)


def reduction(facts: OpFacts) -> Iterator[OpStrategy]:
    """Reductions over some dimensions. A sum over a sharded dimension is a partial sum."""
    shape = facts.shape_of(0)
    dims = reduced_dims(facts)
    keeps = bool(facts.arg(2 + _is_norm(facts), "keepdim", False))
    for dim, _ in dim_states(facts, shape):
        if dim in dims:
            if facts.op.op in ("sum", "mean"):
                yield sharded([shard(dim)], PARTIAL, facts)
        else:
            place = dim if keeps else dim - sum(other < dim for other in dims)
            if place < len(facts.shape):
                yield sharded([shard(dim)], shard(place), facts)
    if facts.op.op in ("sum", "mean"):
        yield from linear_in_one(facts)


def reduced_dims(facts: OpFacts) -> tuple[int, ...]:
    """The dimensions that a reduction reduces."""
    shape = facts.shape_of(0)
    given: Any = facts.arg(1 + _is_norm(facts), "dim", None)
    dims = range(len(shape)) if given is None or given == [] else given if isinstance(given, list | tuple) else [given]
    return tuple(_normal(dim, len(shape)) for dim in dims)


def _is_norm(facts: OpFacts) -> bool:
    """Its second argument is the order of the norm."""
    return facts.op.op == "linalg_vector_norm"


def normalization(facts: OpFacts) -> Iterator[OpStrategy]:
    """Layer and RMS norms over the last dimensions: sharded on any other, with weights of every rank."""
    shape = facts.shape
    normed: Any = facts.arg(1)
    for _dim, state in dim_states(facts, shape[: len(shape) - len(normed)]):
        yield sharded([state, *[BROADCAST] * (len(facts.operands) - 1)], state, facts)


def group_norm(facts: OpFacts) -> Iterator[OpStrategy]:
    """Groups of channels may lie on different ranks."""
    rest = len(facts.operands) - 1
    if facts.divides(facts.shape[0]):
        yield sharded([shard(0), *[BROADCAST] * rest], shard(0), facts)
    if facts.divides(facts.shape[1]) and int(facts.arg(1)) % facts.num_ranks == 0:
        yield sharded([shard(1), *[shard(0)] * rest], shard(1), facts)


def pointwise_loss(facts: OpFacts) -> Iterator[OpStrategy]:
    """Losses of each element (mse, l1): with their reduction."""
    reduce = int(facts.arg(2, "reduction", 1))
    if facts.shape_of(0) != facts.shape_of(1):
        return
    for dim, state in dim_states(facts, facts.shape_of(0)):
        yield sharded([state, state], shard(dim) if reduce == 0 else PARTIAL, facts)


def _normal(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"), along_dim
    ),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "logsumexp", "linalg_vector_norm"), reduction
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), normalization),
    "group_norm": group_norm,
    **dict.fromkeys(("mse_loss", "l1_loss"), pointwise_loss),
}
