"""Drawings of context parallelism: who holds and sees which chunks of a sequence, and what comes to one rank."""

from __future__ import annotations

from svg import BLUE, FAINT, GREEN, INK, LINE, ORANGE, PALE, VIOLET, Canvas

from echelon.parallel.cp.zigzag import ZigzagOrder

RANKS = {0: BLUE, 1: GREEN, 2: ORANGE}
PARTS = {"its own": BLUE, "comes to it": GREEN, "comes around, step by step": VIOLET, "goes to another": ORANGE}


def zigzag() -> str:
    """Chunks of a ring of three, and which of them every step attends to."""
    order = ZigzagOrder(3, 1, 6)
    owner = {place: rank for rank in RANKS for place in order.rank_positions(rank)}
    c = Canvas(366, "Zigzag: a ring of three holds six chunks, and every step is half a square")
    c.text(24, 58, "a sequence, and the rank that holds each chunk", size=12, colour=FAINT)
    for place, rank in owner.items():
        c.box(24 + place * 40, 68, 38, 26, f"{place}", RANKS[rank], size=12)
    c.text(24, 122, "which chunks (rows) see which (columns),", size=12, colour=FAINT)
    c.text(24, 138, "and in which step of the ring", size=12, colour=FAINT)
    cell = 30
    for query, rank in owner.items():
        for key, theirs in owner.items():
            x, y = 24 + key * cell, 150 + query * cell
            if key > query:
                c.rect(x, y, cell - 2, cell - 2, "#ffffff", LINE)
                continue
            c.rect(x, y, cell - 2, cell - 2, PALE[RANKS[rank]], RANKS[rank])
            step = (rank - theirs) % order.ring_size
            c.text(x + cell / 2 - 1, y + cell / 2 + 4, str(step), size=12, anchor="middle")
    left, top, half = 372.0, 96.0, 27.0
    c.text(left, 58, "the block of every rank and step: its two chunks of queries (rows)", size=12, colour=FAINT)
    c.text(left, 74, "and the two chunks of keys that are there (columns)", size=12, colour=FAINT)
    for step in range(order.ring_size):
        c.text(left + 62 + step * 112 + half, top + 2, f"step {step}", size=12, anchor="middle")
    for rank in RANKS:
        y = top + 14 + rank * 78
        c.text(left, y + half + 4, f"rank {rank}", size=12)
        for step in range(order.ring_size):
            theirs = (rank - step) % order.ring_size
            block = order.block(rank, theirs, causal=True)
            x = left + 62 + step * 112
            for row in range(2):
                for column in range(2):
                    seen = _sees(block.queries, row) and _sees(block.keys, column)
                    seen = seen and not (block.causal and column > row)
                    fill = PALE[RANKS[rank]] if seen else "#ffffff"
                    c.rect(x + column * half, y + row * half, half - 2, half - 2, fill, RANKS[rank] if seen else LINE)
                    if seen and block.causal and row == column:
                        _diagonal(c, x + column * half, y + row * half, half - 2)
            c.text(x + 2 * half + 6, y + half + 4, f"of {theirs}", size=12, colour=FAINT)
    c.rect(24, 340, 12, 12, "#ffffff", LINE)
    _diagonal(c, 24, 340, 12)
    c.text(42, 350, "with a causal mask: half of it", size=12, colour=FAINT)
    return c.finish()


def _diagonal(c: Canvas, x: float, y: float, side: float) -> None:
    c.line(x, y, x + side, y + side, INK)


def _sees(part: slice, chunk: int) -> bool:
    return bool(part.start <= chunk < part.stop)


def kinds() -> str:
    """What one rank of four works on, and where that comes from, in each kind."""
    c = Canvas(452, "Four ranks, four heads: what the first rank attends with, and to")
    c.legend(24, 58, {**PARTS, "elsewhere": FAINT})
    own, comes, around, goes, elsewhere = (*PARTS.values(), FAINT)
    ring = [[own] * 4] + [[elsewhere] * 4] * 3
    exchanged = [[own, goes, goes, goes]] + [[comes, elsewhere, elsewhere, elsewhere]] * 3
    both = [[own, own, goes, goes], [comes, comes, elsewhere, elsewhere]]
    panels = {
        "ring": (ring, [[own] * 4, *[[around] * 4] * 3], "one slice of keys and values at a time"),
        "gather": (ring, [[own] * 4, *[[comes] * 4] * 3], "all keys and values at once"),
        "ulysses": (exchanged, exchanged, "all tokens of one head"),
        "ring-ulysses": (
            [*both, *[[elsewhere] * 4] * 2],
            [*both, *[[around, around, elsewhere, elsewhere]] * 2],
            "neighbours exchange heads, pairs are a ring",
        ),
    }
    for number, (name, (queries, keys, words)) in enumerate(panels.items()):
        left, top = 24 + (number % 2) * 392, 96 + (number // 2) * 178
        c.text(left, top, name, weight="bold")
        c.text(left + 100, top, words, size=12, colour=FAINT)
        for x, title, square in ((left + 62, "queries", queries), (left + 222, "keys and values", keys)):
            for row, cells in enumerate(square):
                for column, colour in enumerate(cells):
                    c.box(x + column * 27, top + 14 + row * 27, 25, 25, "", colour)
            c.text(x + 53, top + 140, title, size=12, anchor="middle")
        for row in range(4):
            colour = FAINT if row else INK
            c.text(left + 54, top + 31 + row * 27, f"tokens {row}", size=11, anchor="end", colour=colour)
    back = "Columns are heads. In ulysses and ring-ulysses the result goes back the same way."
    c.text(24, 438, back, size=12, colour=FAINT)
    return c.finish()
