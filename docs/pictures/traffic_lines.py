"""Lines of bytes that a rank sends: kinds of context parallelism, and kinds of tensor parallelism, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import traffic
from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

GIB, MIB = 2**30, 2**20
TOP, HIGH, WIDE = 92.0, 250.0, 268.0
LEFTS = (72.0, 452.0)
GRID = "#d8dee6"


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    """(what stands below, bytes)"""
    dashed: bool = False
    nudge: float = 0.0
    """pixels by which its name is moved, away from another"""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Logarithmic."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    ticks: Sequence[int]
    word: Callable[[int], str]
    """what stands below a tick"""
    lines: Sequence[Line]

    def draw(self, c: Canvas, left: float, y: Axis) -> None:
        x = Axis(low=self.ticks[0], high=self.ticks[-1])
        c.text(left, TOP - 12, self.title, size=13, weight="bold")
        for level in (4 * MIB * 4**n for n in range(9)):
            if y.low <= level <= y.high:
                at = TOP + HIGH * (1 - y.share(level))
                c.line(left, at, left + WIDE, at, GRID)
                label = f"{level / GIB:g} GiB" if level >= GIB else f"{level / MIB:g} MiB"
                c.text(left - 8, at + 4, label, size=11, anchor="end", colour=FAINT)
        for tick in self.ticks:
            at = left + WIDE * x.share(tick)
            c.line(at, TOP + HIGH, at, TOP + HIGH + 4, FAINT)
            c.text(at, TOP + HIGH + 18, self.word(tick), size=11, anchor="middle", colour=FAINT)
        for line in self.lines:
            places = [(left + WIDE * x.share(a), TOP + HIGH * (1 - y.share(b))) for a, b in line.points]
            for (x1, y1), (x2, y2) in pairwise(places):
                c.line(x1, y1, x2, y2, line.colour, dash=line.dashed)
            for across, down in places:
                c.rect(across - 2, down - 2, 4, 4, line.colour, line.colour)
            across, down = places[-1]
            c.text(across + 7, down + 4 + line.nudge, line.name, size=12, colour=line.colour)


def thousands(count: int) -> str:
    return f"{count // 2**20}M" if count >= 2**20 else f"{count // 2**10}K"


def context_bytes() -> str:
    """Against the length of a sequence on 8 ranks, and against ranks."""
    ranks, lengths = [2**n for n in range(1, 8)], [2**n for n in range(13, 21)]
    by_length = [(n, 8, n) for n in lengths]
    by_ranks = [(n, n, traffic.LENGTH) for n in ranks]
    panels = (
        Panel(
            title="on 8 ranks, by the length of a sequence",
            ticks=lengths,
            word=thousands,
            lines=_context_lines(by_length, {"gather": -3, "ring": 2, "ring-ulysses": -2, "ulysses": 6, "heads": 16}),
        ),
        Panel(
            title=f"of {traffic.LENGTH:,} tokens, by ranks",
            ticks=ranks,
            word=str,
            lines=_context_lines(by_ranks, {"gather": -2, "ring": 4, "ulysses": 14}),
        ),
    )
    c = Canvas(432, f"What a rank sends for one layer of {traffic.CONTEXT_MODEL}, forward and backward, in bfloat16")
    c.text(24, 56, "dashed: runs beside attention    solid: waited for", size=12, colour=FAINT)
    for left, panel in zip(LEFTS, panels, strict=True):
        panel.draw(c, left, Axis(low=8 * MIB, high=24 * GIB))
    c.text(24, 396, "ring and gather send the keys and values of the full sequence, whatever the ranks;", size=12)
    c.text(24, 414, "what ulysses sends falls with the ranks, as far as there are heads to exchange.", size=12)
    return c.finish()


def _context_lines(at: Sequence[tuple[int, int, int]], nudges: dict[str, float]) -> list[Line]:
    """Of (what stands below, ranks, length)."""
    found = []
    for kind, colour in {"ring": BLUE, "gather": RED, "ulysses": GREEN, "ring-ulysses": VIOLET}.items():
        layouts = [(x, traffic.context_layout(kind, ranks), length) for x, ranks, length in at]
        for hidden in (True, False) if kind == "ring-ulysses" else (True,):
            name = kind if hidden else "heads"
            points = [(x, traffic.context_bytes(one, length, hidden=hidden)) for x, one, length in layouts if one]
            dashed = hidden and kind.startswith("ring")
            nudge = nudges.get(name, 0)
            name = name if hidden else "of it, heads"
            found.append(Line(name=name, colour=colour, points=points, dashed=dashed, nudge=nudge))
    return found


def tensor_bytes() -> str:
    """Against the length of a sequence on 64 ranks, and against ranks."""
    ranks, lengths = [2**n for n in range(1, 10)], [2**n for n in range(6, 14)]
    panels = (
        Panel(
            title="on 64 ranks, by the length of a sequence",
            ticks=lengths,
            word=lambda tick: f"{tick:,}",
            lines=_tensor_lines([(n, 64, n) for n in lengths], {"2d": -3, "2.5d": 5}),
        ),
        Panel(
            title=f"of {traffic.GRID_LENGTH:,} tokens each, by ranks",
            ticks=ranks,
            word=str,
            lines=_tensor_lines([(n, n, traffic.GRID_LENGTH) for n in ranks], {"2.5d": 18}),
        ),
    )
    c = Canvas(432, f"What a rank sends for one layer of {traffic.GRID_MODEL}, forward and backward, in bfloat16")
    several = f"microbatches of {traffic.SEQUENCES} sequences, so that a grid has some for every rank"
    c.text(24, 56, f"{several}; 2.5d in {traffic.DEPTH} layers", size=12, colour=FAINT)
    for left, panel in zip(LEFTS, panels, strict=True):
        panel.draw(c, left, Axis(low=256 * MIB, high=96 * GIB))
    c.text(24, 396, "Flat tp sends all activations, whatever the ranks. A grid sends less with every rank,", size=12)
    c.text(24, 414, "and weights too: where tokens are few, these are the most of it.", size=12)
    return c.finish()


def _tensor_lines(at: Sequence[tuple[int, int, int]], nudges: dict[str, float]) -> list[Line]:
    """Of (what stands below, ranks, length)."""
    found = []
    for kind, colour in {"1d": INK, "2d": BLUE, "2.5d": ORANGE, "3d": GREEN}.items():
        layouts = [(x, traffic.tensor_layout(kind, ranks), length) for x, ranks, length in at]
        points = [(x, traffic.tensor_bytes(one, length)) for x, one, length in layouts if one]
        name = "1d, sp" if kind == "1d" else kind
        found.append(Line(name=name, colour=colour, points=points, nudge=nudges.get(kind, 0)))
    return found
