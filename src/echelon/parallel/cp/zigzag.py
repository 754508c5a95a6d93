"""`ZigzagOrder`: which tokens of a sequence each cp rank holds, and which attention blocks follow.

[Note: zigzag]

Under a causal mask the last tokens attend to the most keys. A ring of n ranks therefore cuts a sequence into 2n chunks,
and rank i holds chunks i and 2n - 1 - i: one with little attention and one with much. With n = 3:

    chunk        0   1   2   3   4   5                    keys of rank   0        1        2
    rank         0   1   2   2   1   0        rank 0 attends          causal   right    right
                                              rank 1                   left    causal   right
                                              rank 2                   left     left    causal

    causal   own tokens: both chunks, by position                              half of the square
    left     all queries see the first chunk of the keys, which is before both     half of the square
    right    the second chunk of the queries sees both chunks of the keys          half of the square

So every step of the ring is half of a square on every rank, and only the first has a mask. With ring-ulysses, the
neighbours that exchange heads divide the tokens of one ring position, in order.

Under a window a chunk attends to itself and to the chunks just before it. So the blocks are of one chunk with another,
and a rank receives only keys that some of its tokens reach (window_attention.py). With a window that is no longer than
a chunk these are keys of the two neighbours of a rank, whatever n is.

A length that does not divide is padded at its end. No query comes after padding, so a causal mask hides it; without
one, its keys are masked (cp_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionBlock:
    """Queries of a rank and keys of another, or of all: each query attends to each key, or to those up to its own."""

    queries: slice
    keys: slice
    causal: bool
    shift: int = 0
    """tokens between the first key and the first query, where a window counts them"""
    window: int | None = None
    """the window, if not all keys of the block are inside that of every query"""


@dataclass(frozen=True)
class ZigzagOrder:
    """A sequence of `seq_len` tokens on `ring_size` groups of `ulysses_size` ranks."""

    ring_size: int
    ulysses_size: int
    seq_len: int

    @property
    def chunk_len(self) -> int:
        """Tokens of a chunk, padding included; the ranks of a group divide two of them."""
        unit = self.ulysses_size if self.ulysses_size % 2 else self.ulysses_size // 2
        tokens = -(-self.seq_len // (2 * self.ring_size))
        return -(-tokens // unit) * unit

    @property
    def padded_len(self) -> int:
        return 2 * self.ring_size * self.chunk_len

    def chunk_ids(self, ring_rank: int) -> tuple[int, int]:
        """Return the chunks of one group, in the order in which it holds them."""
        return ring_rank, 2 * self.ring_size - 1 - ring_rank

    def ring_positions(self, ring_rank: int) -> list[int]:
        """Return the positions of a group's tokens in the sequence."""
        size = self.chunk_len
        return [place for chunk in self.chunk_ids(ring_rank) for place in range(chunk * size, (chunk + 1) * size)]

    def rank_positions(self, rank: int) -> list[int]:
        """Return the positions of a cp rank's tokens in the sequence."""
        ring, inner = divmod(rank, self.ulysses_size)
        count = self.padded_len // (self.ring_size * self.ulysses_size)
        return self.ring_positions(ring)[inner * count : (inner + 1) * count]

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, query_rank: int, key_rank: int, *, causal: bool) -> AttentionBlock:
        """Return the block of one group's queries and another's keys."""
        chunk = self.chunk_len
        both, first, second = slice(0, 2 * chunk), slice(0, chunk), slice(chunk, 2 * chunk)
        if not causal or key_rank == query_rank:
            return AttentionBlock(both, both, causal)
        return AttentionBlock(both, first, False) if key_rank < query_rank else AttentionBlock(second, both, False)

    def window_blocks(self, query_rank: int, key_rank: int, window: int) -> Iterator[AttentionBlock]:
        """Yield the blocks of one group's queries and another's keys of which some are inside the queries' window."""
        size = self.chunk_len
        for row, chunk in enumerate(self.chunk_ids(query_rank)):
            for column, key_chunk in enumerate(self.chunk_ids(key_rank)):
                shift = (chunk - key_chunk) * size
                if shift < 0 or shift - size + 1 >= window:
                    continue
                yield AttentionBlock(
                    slice(row * size, (row + 1) * size),
                    slice(column * size, (column + 1) * size),
                    causal=not shift,
                    shift=shift,
                    window=window if shift + size > window else None,
                )

    def window_keys(self, query_rank: int, key_rank: int, window: int) -> slice:
        """Return the keys of one group to which queries of another attend."""
        keys = [block.keys for block in self.window_blocks(query_rank, key_rank, window)]
        return slice(min(k.start for k in keys), max(k.stop for k in keys)) if keys else slice(0, 0)

    def window_offsets(self, window: int) -> tuple[int, ...]:
        """Return how far before a group on the ring are those whose keys some group attends to; 0 is its own."""
        size = self.ring_size
        pairs = {step: [(rank, (rank - step) % size) for rank in range(size)] for step in range(size)}
        return tuple(step for step in pairs if any(any(self.window_blocks(*pair, window)) for pair in pairs[step]))

    def gathered_blocks(self, query_rank: int, *, causal: bool, window: int | None = None) -> Iterator[AttentionBlock]:
        """Yield the blocks of a group's queries and the full sequence's keys in natural order."""
        if not causal:
            yield AttentionBlock(slice(0, 2 * self.chunk_len), slice(0, self.padded_len), False)
            return
        for half, chunk in enumerate(self.chunk_ids(query_rank)):
            queries, start = slice(half * self.chunk_len, (half + 1) * self.chunk_len), chunk * self.chunk_len
            if window is not None:
                first, stop = max(start - window + 1, 0), start + self.chunk_len
                yield AttentionBlock(queries, slice(first, stop), True, start - first, window)
                continue
            if start:
                yield AttentionBlock(queries, slice(0, start), False)
            yield AttentionBlock(queries, slice(start, start + self.chunk_len), True)
