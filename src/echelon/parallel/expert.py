"""Expert parallelism: each rank holds some experts, and tokens travel to theirs. Its cost, for planning; plan only."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.layout import Layout
from echelon.layout.cost import Collective


def collectives(layout: Layout, *, layers: int, tokens: float, token_bytes: float, top_k: int) -> Iterable[Collective]:
    """What a step issues over ep: out and back, in forward and in backward. `tokens` are a rank's of a microbatch."""
    if layout.ep == 1:
        return
    passes = 3 if layout.recompute == "full" else 2
    size = int(tokens * token_bytes * top_k)
    count = 2 * passes * layers * layout.accumulate
    yield Collective(kind="all_to_all", axis="ep", bytes=size, count=count, part="tokens")
