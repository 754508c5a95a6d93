"""Context parallelism: each rank holds a slice of every sequence. Its cost, for planning; plan only.

ring           keys and values go around: every rank sees each slice once, beside attention on the one before
gather         they are gathered before attention, and their gradients scattered after it
ulysses        queries, keys, values and the result are exchanged, so that attention has whole sequences of few heads
ring-ulysses   heads are exchanged inside groups of `ulysses` ranks, slices go around between groups
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.layout import Layout
from echelon.layout.cost import Collective


def collectives(
    layout: Layout, *, layers: int, tokens: float, query_bytes: float, kv_bytes: float
) -> Iterable[Collective]:
    """What a step issues over cp. `tokens` are a rank's of a microbatch; bytes are a token's on one tp rank."""
    if layout.cp == 1:
        return
    recomputed = 1 if layout.recompute == "full" else 0
    times = layers * layout.accumulate
    ring = layout.cp // layout.ulysses
    if layout.ulysses > 1:
        # Queries, keys and values out, the result back; in backward the same the other way.
        whole = int(tokens * (2 * query_bytes + kv_bytes))
        yield Collective(kind="all_to_all", axis="cp", bytes=whole, count=(2 + recomputed) * times, part="heads")
    if layout.cp_kind == "gather":
        whole = int(tokens * kv_bytes * layout.cp)
        yield Collective(kind="all_gather", axis="cp", bytes=whole, count=(2 + recomputed) * times, part="context")
        yield Collective(kind="reduce_scatter", axis="cp", bytes=whole, count=times, part="context")
    elif ring > 1:
        # Forward keys and values, backward those and their gradients, one slice at a time.
        slices = int(tokens * kv_bytes)
        count = (3 + recomputed) * (ring - 1) * times
        yield Collective(kind="send", axis="cp", bytes=slices, count=count, hidden=True, part="context")
