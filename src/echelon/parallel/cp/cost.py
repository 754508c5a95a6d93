"""Context parallelism: the whole model sees a slice of every sequence, and attention reaches the others.

    ring           keys and values go around, each slice once past every rank, beside attention (ring.py)
    gather         they are gathered before attention, and their gradients scattered after it (gather.py)
    ulysses        heads are exchanged for tokens, so that attention has whole sequences of few heads (ulysses.py)
    ring-ulysses   heads are exchanged between neighbours (`ulysses` of them), slices go around between their groups

All but attention works on tokens one by one and needs no change. What depends on where a token is comes from outside:
every rank is given whole sequences, of which it computes positions and documents before it cuts them (spread.py).
Dropout masks are functions of the place in the whole sequence. Losses and counts are parts, summed over cp as over dp,
and so are gradients (shard.py). A model takes part if its attention is an `echelon.Core` and its forward takes
`positions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.rules import head_parallel_size
from echelon.memory.checkpointing.cost import RecomputedLayers
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.tp.cost import TransformerSizes


@dataclass(frozen=True, kw_only=True)
class AttentionWidths:
    """What attention has of a token on one rank of tp, in elements."""

    queries: int
    """of all query heads"""
    keys_and_values: int
    """as they travel: values that are narrower than keys are padded to them (spread.py)"""
    kv_heads: int
    results: int = 0
    """of all query heads; 0: as many as queries"""

    @classmethod
    def per_rank(cls, num_ranks: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> AttentionWidths:
        """On each of `side` ranks that divide the heads of a model."""
        mine = max(kv_heads // num_ranks, 1)
        return cls(
            queries=heads * head_dim // num_ranks,
            keys_and_values=2 * mine * head_dim,
            kv_heads=mine,
            results=heads * value_dim // num_ranks,
        )


def tokens_per_rank(layout: Layout, seq_len: int) -> int:
    """Tokens of a sequence on one rank of cp, padding included."""
    return ZigzagOrder(layout.cp // layout.ulysses, layout.ulysses, seq_len).padded_len // layout.cp


def transformer_collectives(
    sizes: TransformerSizes, layout: Layout, ring_index: int = -1, recomputed: RecomputedLayers | None = None
) -> Iterable[Collective]:
    """What a step of a transformer issues over cp."""
    side, head_dim = head_parallel_size(layout) or 1, sizes.head_dim or sizes.width // sizes.heads
    return collectives(
        layout,
        AttentionWidths.per_rank(
            side,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            value_dim=sizes.value_dim or head_dim,
        ),
        layers=sizes.layers,
        batch=-(-sizes.batch // (layout.tp // side)),  # a grid divides sequences by what it does not divide heads by
        seq_len=sizes.seq_len,
        element_bytes=sizes.element_bytes,
        causal=sizes.causal,
        ring_index=ring_index,
        recomputed=recomputed,
    )


def collectives(
    layout: Layout,
    widths: AttentionWidths,
    *,
    layers: int,
    batch: int,
    seq_len: int,
    element_bytes: int,
    causal: bool = True,
    ring_index: int = -1,
    recomputed: RecomputedLayers | None = None,
) -> Iterable[Collective]:
    """What a step issues over cp for so many layers; `batch` sequences are in a microbatch. `repeated` says which
    layers are, where the layout does not.

    A ring's ranks differ under a causal mask in the keys whose gradients they find: this is the one at `place`, or one
    in the middle.
    """
    if layout.cp == 1:
        return
    outer = layout.cp // layout.ulysses
    tokens = batch * tokens_per_rank(layout, seq_len)
    copies = lcm(layout.ulysses, widths.kv_heads) // widths.kv_heads  # to every rank that has a query of theirs
    moved = tokens * widths.keys_and_values * copies
    times = layers * layout.accumulate
    recomputed = recomputed or RecomputedLayers.from_policy(layout.recompute, layers=layers)
    whole, again = (
        count * layout.accumulate for count in (recomputed.layers, recomputed.layers + recomputed.attention_cores)
    )
    if layout.ulysses > 1:
        yield from ulysses_collectives(
            "ulysses" if outer > 1 else "cp",
            qkv_bytes=(tokens * widths.queries + moved) * element_bytes,
            output_bytes=tokens * (widths.results or widths.queries) * element_bytes,
            num_attentions=times,
            num_recomputed=(again, whole),
        )
    axis, size = "ring" if layout.ulysses > 1 else "cp", moved * element_bytes
    if layout.cp_kind == "gather":
        summed = moved * max(element_bytes, 4)
        yield from all_gather_collectives(
            axis, outer, kv_bytes=size, gradient_bytes=summed, num_attentions=times, num_recomputed=again
        )
    elif outer > 1:
        before = (ring_index if ring_index >= 0 else (outer - 1) // 2) if causal else 0
        yield from ring_collectives(
            axis, outer, kv_bytes=size, num_earlier=before, num_attentions=times, num_recomputed=again
        )


# Of `times` attentions in a step, and `again` more where forward is repeated; bytes are of a rank's tokens.


def ring_collectives(
    axis: str, ranks: int, *, kv_bytes: int, num_earlier: int, num_attentions: int, num_recomputed: int
) -> Iterable[Collective]:
    """ring.py: once around forward and once backward; gradients go home, of ranks `before` this one those of half."""
    count = (ranks - 1) * (2 * num_attentions + num_recomputed)
    yield Collective(op="send", axis=axis, bytes=kv_bytes, count=count, overlapped=True, purpose="keys and values")
    for size, others in ((kv_bytes // 2, num_earlier), (kv_bytes, ranks - 1 - num_earlier)):
        yield Collective(
            op="send", axis=axis, bytes=size, count=others * num_attentions, overlapped=True, purpose="their gradients"
        )


def all_gather_collectives(
    axis: str, ranks: int, *, kv_bytes: int, gradient_bytes: int, num_attentions: int, num_recomputed: int
) -> Iterable[Collective]:
    """gather.py: all at once, in forward and again in backward, whose gradients are scattered."""
    count = 2 * num_attentions + num_recomputed
    yield Collective(op="all_gather", axis=axis, bytes=ranks * kv_bytes, count=count, purpose="keys and values")
    yield Collective(
        op="reduce_scatter", axis=axis, bytes=ranks * gradient_bytes, count=num_attentions, purpose="their gradients"
    )


def ulysses_collectives(
    axis: str, *, qkv_bytes: int, output_bytes: int, num_attentions: int, num_recomputed: tuple[int, int]
) -> Iterable[Collective]:
    """ulysses.py: there and back, in forward and in backward. A core that is repeated alone need not come back."""
    there, back = (2 * num_attentions + more for more in num_recomputed)
    yield Collective(op="all_to_all", axis=axis, bytes=qkv_bytes, count=there, purpose="heads")
    yield Collective(op="all_to_all", axis=axis, bytes=output_bytes, count=back, purpose="heads")
