"""Which tokens of a sequence each rank of cp holds, and which of them see which.

[Note: zigzag]

With causal masks the last tokens have the most to see. A ring of n ranks therefore cuts a sequence into 2n chunks, and
rank i holds chunks i and 2n - 1 - i: one that sees little and one that sees much. With n = 3:

    chunk        0   1   2   3   4   5                    keys of rank   0        1        2
    rank         0   1   2   2   1   0        rank 0 sees             causal   right    right
                                              rank 1                   left    causal   right
                                              rank 2                   left     left    causal

    causal   own tokens: both chunks, by position                              half of the square
    left     all queries see the first chunk of the keys, which is before both     half of the square
    right    the second chunk of the queries sees both chunks of the keys          half of the square

So every step of the ring is half of a square on every rank, and none but the first has a mask. Where heads are
exchanged too, the neighbours that exchange them divide what one rank of the ring holds, in its order.

A length that does not divide is padded at its end. Padding is not before anything, so a causal mask hides it; where
there is none, its keys are hidden (reach.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Queries of a rank that see keys of another, or of all: each query each key, or those up to its own place."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """How many queries see how many keys."""
        queries: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class Zigzag:
    """A sequence of `length` tokens on `ring` groups of `inner` ranks."""

    ring: int
    inner: int
    length: int

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, padding included; two of them divide by the ranks of a group."""
        grain = self.inner if self.inner % 2 else self.inner // 2
        tokens = -(-self.length // (2 * self.ring))
        return -(-tokens // grain) * grain

    @property
    def padded(self) -> int:
        return 2 * self.ring * self.chunk

    def chunks(self, ring: int) -> tuple[int, int]:
        """Of one group, in the order in which it holds them."""
        return ring, 2 * self.ring - 1 - ring

    def group_places(self, ring: int) -> list[int]:
        """Where the tokens of a group are in the sequence."""
        return [place for c in self.chunks(ring) for place in range(c * self.chunk, (c + 1) * self.chunk)]

    def places(self, rank: int) -> list[int]:
        """Where the tokens of a rank of cp are in the sequence."""
        ring, inner = divmod(rank, self.inner)
        mine = self.padded // (self.ring * self.inner)
        return self.group_places(ring)[inner * mine : (inner + 1) * mine]

    # -- who sees what ------------------------------------------------------------------------------------------------

    def block(self, mine: int, theirs: int, *, causal: bool) -> Block:
        """What group `mine` sees of group `theirs`."""
        both, first, second = slice(0, 2 * self.chunk), slice(0, self.chunk), slice(self.chunk, 2 * self.chunk)
        if not causal:
            return Block(both, both, False)
        if theirs == mine:
            return Block(both, both, True)
        return Block(both, first, False) if theirs < mine else Block(second, both, False)

    def blocks_of_all(self, mine: int, *, causal: bool) -> Iterator[Block]:
        """What group `mine` sees of the whole sequence in its own order."""
        if not causal:
            yield Block(slice(0, 2 * self.chunk), slice(0, self.padded), False)
            return
        for half, chunk in enumerate(self.chunks(mine)):
            queries, start = slice(half * self.chunk, (half + 1) * self.chunk), chunk * self.chunk
            if start:
                yield Block(queries, slice(0, start), False)
            yield Block(queries, slice(start, start + self.chunk), True)
