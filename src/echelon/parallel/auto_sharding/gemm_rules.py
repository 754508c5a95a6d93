"""Sharding rules of GEMMs, convolutions, attention, lookups and losses over a vocabulary.

[Note: a sharded GEMM]

    batch, rows      of one operand: sharded there; the other is read whole by every rank, and is `B`
    columns          the same of the other: column-parallel
    contracted       sharded in both: every rank has a partial sum: row-parallel
    a partial sum    of one operand: the result is one

A bias is added to whole sums. Behind a contracted dimension one rank alone adds it, and the gradient that reaches it is
that of the whole sum, which every rank has: it is `R` (local_ops.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.parallel.auto_sharding.op_facts import OpFacts, OpStrategy, Rule, dim_states, linear_in_one, sharded
from echelon.parallel.auto_sharding.sharding import BROADCAST, PARTIAL, REPLICATE, Sharding, shard

FUSED = (1, 2, 3)
"""blocks of outputs: gate and up, or q, k and v, may be one linear"""


def linear(facts: OpFacts) -> Iterator[OpStrategy]:
    x, last = facts.shape_of(0), len(facts.shape) - 1
    has_bias = len(facts.operands) == 3
    outputs, inputs = facts.shape_of(1)
    for blocks in FUSED:
        if facts.divides(outputs, blocks):
            own = shard(0, blocks)
            yield sharded([BROADCAST, own, *[own] * has_bias], shard(last, blocks), facts)
    if facts.divides(inputs):
        yield sharded([shard(last), shard(1), *[REPLICATE] * has_bias], PARTIAL, facts)
    for dim, state in dim_states(facts, x[:-1]):
        yield sharded([state, BROADCAST, *[BROADCAST] * has_bias], shard(dim), facts)
    if not has_bias:
        yield from linear_in_one(facts, 0)


def matmul(facts: OpFacts) -> Iterator[OpStrategy]:
    """matmul, mm, bmm: with dimensions of a batch that broadcast."""
    a, b = facts.shape_of(0), facts.shape_of(1)
    if len(a) < 2 or len(b) < 2:
        return
    rank = len(facts.shape)
    for dim in range(rank - 2):
        if facts.divides(facts.shape[dim]):
            own = [dim - (rank - len(shape)) for shape in (a, b)]
            states = [shard(d) if d >= 0 and shape[d] != 1 else BROADCAST for d, shape in zip(own, (a, b), strict=True)]
            yield sharded(states, shard(dim), facts)
    if facts.divides(a[-2]):
        yield sharded([shard(len(a) - 2), BROADCAST], shard(rank - 2), facts)
    if facts.divides(b[-1]):
        yield sharded([BROADCAST, shard(len(b) - 1)], shard(rank - 1), facts)
    if facts.divides(a[-1]):
        yield sharded([shard(len(a) - 1), shard(len(b) - 2)], PARTIAL, facts)
    yield from linear_in_one(facts, 0)
    yield from linear_in_one(facts, 1)


def einsum(facts: OpFacts) -> Iterator[OpStrategy]:
    equation = str(facts.arg(0)).replace(" ", "")
    if "." in equation or "->" not in equation:
        return
    left, output = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in terms):
        return
    sizes = {
        letter: size
        for term, operand in zip(terms, facts.operands, strict=True)
        for letter, size in zip(term, operand.shape, strict=True)
    }
    for letter in sorted(sizes):
        if facts.divides(sizes[letter]):
            states = [shard(term.index(letter)) if letter in term else BROADCAST for term in terms]
            yield sharded(states, shard(output.index(letter)) if letter in output else PARTIAL, facts)
    for position in range(len(terms)):
        yield from linear_in_one(facts, position)


def convolution(facts: OpFacts) -> Iterator[OpStrategy]:
    """Channels are sharded as the features of a linear are; those of groups with their groups."""
    weight, has_bias = facts.shape_of(1), len(facts.operands) == 3
    if len(facts.shape_of(0)) != len(weight):  # one image, without a dimension of images
        return
    groups = int(facts.arg(6, "groups", 1))
    if (groups == 1 or groups % facts.num_ranks == 0) and facts.divides(weight[0]):
        x = BROADCAST if groups == 1 else shard(1)
        yield sharded([x, shard(0), *[shard(0)] * has_bias], shard(1), facts)
    if groups == 1 and facts.divides(weight[1]):
        yield sharded([shard(1), shard(1), *[REPLICATE] * has_bias], PARTIAL, facts)
    if facts.divides(facts.shape[0]):
        yield sharded([shard(0), BROADCAST, *[BROADCAST] * has_bias], shard(0), facts)
    if not has_bias:
        yield from linear_in_one(facts, 0)


def attention(facts: OpFacts) -> Iterator[OpStrategy]:
    """scaled_dot_product_attention: sharded over sequences or heads; over queries where a mask says what they see."""
    shapes = [operand.shape for operand in facts.operands[:3]]
    rank, has_mask = len(facts.shape), len(facts.operands) > 3
    for dim in range(rank - 2):
        if not all(len(shape) == rank and facts.divides(shape[dim]) for shape in shapes):
            continue
        states: list[Sharding] = [shard(dim)] * 3
        if has_mask:
            mask = facts.shape_of(3)
            own = dim - (rank - len(mask))
            states.append(shard(own) if own >= 0 and mask[own] != 1 else BROADCAST)
        yield sharded(states, shard(dim), facts)
    is_causal = bool(facts.arg(5, "is_causal", False))
    if not is_causal and facts.divides(facts.shape[-2]):
        rows: list[Sharding] = [shard(rank - 2), BROADCAST, BROADCAST]
        if has_mask:
            mask = facts.shape_of(3)
            rows.append(shard(len(mask) - 2) if mask[-2] != 1 else BROADCAST)
        yield sharded(rows, shard(rank - 2), facts)


def embedding(facts: OpFacts) -> Iterator[OpStrategy]:
    """Rows of the table: vocabulary-parallel, a rank without the row adds zeros. Columns, or tokens."""
    table, ids = facts.shape_of(0), facts.shape_of(1)
    if facts.arg(3, "scale_grad_by_freq", False):  # counts all tokens
        return
    if facts.divides(table[0]):
        yield sharded([shard(0), REPLICATE], PARTIAL, facts)
    if facts.divides(table[1]):
        yield sharded([shard(1), REPLICATE], shard(len(facts.shape) - 1), facts)
    for dim, state in dim_states(facts, ids):
        yield sharded([BROADCAST, state], shard(dim), facts)


def cross_entropy(facts: OpFacts) -> Iterator[OpStrategy]:
    """Over a sharded vocabulary no rank gathers the logits (vocab_cross_entropy.py); over tokens the sum is partial."""
    logits, is_plain = facts.shape_of(0), len(facts.operands) == 2 and not facts.arg(5, "label_smoothing", 0.0)
    is_plain = is_plain and not facts.operands[1].dtype.is_floating_point  # probabilities
    reduce = int(facts.arg(3, "reduction", 1))
    if not is_plain or len(logits) != 2 or int(facts.arg(4, "ignore_index", -100)) != -100:
        return
    if facts.divides(logits[1]):
        yield sharded([shard(1), REPLICATE], REPLICATE, facts)
    if facts.divides(logits[0]) and reduce != 1:  # a mean counts targets
        yield sharded([shard(0), shard(0)], shard(0) if reduce == 0 else PARTIAL, facts)


def gather(facts: OpFacts) -> Iterator[OpStrategy]:
    """gather and index_select: along a dimension that stays whole."""
    x, own = facts.shape_of(0), _normal(facts.arg(1, "dim"), len(facts.shape_of(0)))
    index = facts.shape_of(1)
    for dim, state in dim_states(facts, x):
        if dim != own and facts.shape[dim] == x[dim]:
            same = facts.op.op == "gather"
            if not same or index[dim] == x[dim]:
                yield sharded([state, state if same else REPLICATE], shard(dim), facts)
    yield from linear_in_one(facts, 0)


def interpolate(facts: OpFacts) -> Iterator[OpStrategy]:
    """Pooling and resizing of images: sharded over images or channels."""
    if len(facts.shape) != (3 if facts.op.op.endswith("1d") else 4):  # one image
        return
    for dim in (0, 1):
        if facts.divides(facts.shape[dim]) and facts.shape_of(0)[dim] == facts.shape[dim]:
            yield sharded([shard(dim)], shard(dim), facts)


def _normal(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def names(*words: str) -> Sequence[str]:
    return words


RULES: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(names("matmul", "mm", "bmm"), matmul),
    "einsum": einsum,
    **dict.fromkeys(names("conv1d", "conv2d", "conv3d"), convolution),
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    "cross_entropy_loss": cross_entropy,
    **dict.fromkeys(names("gather", "index_select"), gather),
    **dict.fromkeys(
        names(
            "max_pool2d",
            "avg_pool2d",
            "max_pool1d",
            "avg_pool1d",
            "adaptive_avg_pool2d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "upsample_nearest1d",
            "pixel_shuffle",
        ),
        interpolate,
    ),
}
