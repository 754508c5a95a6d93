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
from echelon.layout.rules import tp_side
from echelon.memory.checkpointing.cost import Again
from echelon.parallel.cp.zigzag import Zigzag
from echelon.parallel.tp.tensor_parallel import Traffic


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What attention has of a token on one rank of tp, in elements."""

    queries: int
    """of all query heads"""
    keys_and_values: int
    """as they travel: values that are narrower than keys are padded to them (spread.py)"""
    kv_heads: int
    results: int = 0
    """of all query heads; 0: as many as queries"""

    @classmethod
    def of(cls, side: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> Widths:
        """On each of `side` ranks that divide the heads of a model."""
        mine = max(kv_heads // side, 1)
        return cls(
            queries=heads * head_dim // side,
            keys_and_values=2 * mine * head_dim,
            kv_heads=mine,
            results=heads * value_dim // side,
        )


def slice_length(layout: Layout, seq_len: int) -> int:
    """Tokens of a sequence on one rank of cp, padding included."""
    return Zigzag(layout.cp // layout.ulysses, layout.ulysses, seq_len).padded // layout.cp


def of_traffic(traffic: Traffic, layout: Layout, place: int = -1, again: Again | None = None) -> Iterable[Collective]:
    """What a step of a transformer issues over cp."""
    side, head_dim = tp_side(layout) or 1, traffic.head_dim or traffic.width // traffic.heads
    return collectives(
        layout,
        Widths.of(
            side,
            heads=traffic.heads,
            kv_heads=traffic.kv_heads,
            head_dim=head_dim,
            value_dim=traffic.value_dim or head_dim,
        ),
        layers=traffic.layers,
        batch=-(-traffic.batch // (layout.tp // side)),  # a grid divides sequences by what it does not divide heads by
        seq_len=traffic.seq_len,
        element_bytes=traffic.element_bytes,
        causal=traffic.causal,
        place=place,
        repeated=again,
    )


def collectives(
    layout: Layout,
    widths: Widths,
    *,
    layers: int,
    batch: int,
    seq_len: int,
    element_bytes: int,
    causal: bool = True,
    place: int = -1,
    repeated: Again | None = None,
) -> Iterable[Collective]:
    """What a step issues over cp for so many layers; `batch` sequences are in a microbatch. `repeated` says which
    layers are, where the layout does not.

    A ring's ranks differ under a causal mask in the keys whose gradients they find: this is the one at `place`, or one
    in the middle.
    """
    if layout.cp == 1:
        return
    outer = layout.cp // layout.ulysses
    tokens = batch * slice_length(layout, seq_len)
    copies = lcm(layout.ulysses, widths.kv_heads) // widths.kv_heads  # to every rank that has a query of theirs
    moved = tokens * widths.keys_and_values * copies
    times = layers * layout.accumulate
    repeated = repeated or Again.of(layout.recompute, layers=layers)
    whole, again = (count * layout.accumulate for count in (repeated.layers, repeated.layers + repeated.cores))
    if layout.ulysses > 1:
        yield from ulysses(
            "ulysses" if outer > 1 else "cp",
            there_bytes=(tokens * widths.queries + moved) * element_bytes,
            back_bytes=tokens * (widths.results or widths.queries) * element_bytes,
            times=times,
            again=(again, whole),
        )
    axis, size = "ring" if layout.ulysses > 1 else "cp", moved * element_bytes
    if layout.cp_kind == "gather":
        summed = moved * max(element_bytes, 4)
        yield from gather(axis, outer, kv_bytes=size, gradient_bytes=summed, times=times, again=again)
    elif outer > 1:
        before = (place if place >= 0 else (outer - 1) // 2) if causal else 0
        yield from ring(axis, outer, kv_bytes=size, before=before, times=times, again=again)


# Of `times` attentions in a step, and `again` more where forward is repeated; bytes are of a rank's tokens.


def ring(axis: str, ranks: int, *, kv_bytes: int, before: int, times: int, again: int) -> Iterable[Collective]:
    """ring.py: once around forward and once backward; gradients go home, of ranks `before` this one those of half."""
    count = (ranks - 1) * (2 * times + again)
    yield Collective(kind="send", axis=axis, bytes=kv_bytes, count=count, hidden=True, part="keys and values")
    for size, others in ((kv_bytes // 2, before), (kv_bytes, ranks - 1 - before)):
        yield Collective(kind="send", axis=axis, bytes=size, count=others * times, hidden=True, part="their gradients")


def gather(
    axis: str, ranks: int, *, kv_bytes: int, gradient_bytes: int, times: int, again: int
) -> Iterable[Collective]:
    """gather.py: all at once, in forward and again in backward, whose gradients are scattered."""
    count = 2 * times + again
    yield Collective(kind="all_gather", axis=axis, bytes=ranks * kv_bytes, count=count, part="keys and values")
    yield Collective(
        kind="reduce_scatter", axis=axis, bytes=ranks * gradient_bytes, count=times, part="their gradients"
    )


def ulysses(
    axis: str, *, there_bytes: int, back_bytes: int, times: int, again: tuple[int, int]
) -> Iterable[Collective]:
    """ulysses.py: there and back, in forward and in backward. A core that is repeated alone need not come back."""
    there, back = (2 * times + more for more in again)
    yield Collective(kind="all_to_all", axis=axis, bytes=there_bytes, count=there, part="heads")
    yield Collective(kind="all_to_all", axis=axis, bytes=back_bytes, count=back, part="heads")
