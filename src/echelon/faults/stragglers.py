"""Who is slow, though all steps take equally long: everybody waits for the slowest at the next collective.

So a rank's step is taken apart: waiting for others (the ring knows), waiting for data, and the rest, which is its own
work. Ranks of one pipeline stage have the same work; where a stage is one rank alone, others are a poorer measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

FACTOR = 1.25
"""how much longer than its peers a slow rank works"""
FACTOR_ELSEWHERE = 2.0
"""the same where its peers have other work: stages of a pipeline are not cut evenly"""
SHARE = 0.05
"""of a step that a stall must cost"""
LEAST = 1e-3
"""seconds of a step that a stall must cost"""


@dataclass(frozen=True)
class Share:
    """Mean seconds of one rank's steps."""

    work: float
    data: float
    waiting: float

    @property
    def step(self) -> float:
        return self.work + self.data + self.waiting


@dataclass(frozen=True)
class Straggler:
    rank: int
    cause: str
    """`work` or `data`"""
    seconds: float
    """of a step"""
    usual: float
    """what its peers take"""

    def told(self, position: str) -> str:
        name = f"rank {self.rank} ({position})" if position else f"rank {self.rank}"
        times = f", {self.seconds / self.usual:.1f} x" if self.usual > LEAST else ""
        does = "works" if self.cause == "work" else "waits for data"
        return (
            f"{name} is slow: it {does} {_ms(self.seconds)} of each step, its peers {_ms(self.usual)}{times}; "
            "the others wait for it"
        )


def straggler(shares: Sequence[Share], stages: Sequence[int]) -> Straggler | None:
    """The rank that costs the others most, if one does. `stages` are the pipeline stages of the ranks."""
    found = []
    for rank, share in enumerate(shares):
        for cause in ("work", "data"):
            alike = [getattr(s, cause) for r, s in enumerate(shares) if r != rank and stages[r] == stages[rank]]
            others = alike or [getattr(s, cause) for r, s in enumerate(shares) if r != rank]
            if not others:
                continue
            usual, mine = median(others), getattr(share, cause)
            factor = FACTOR if alike or cause == "data" else FACTOR_ELSEWHERE
            if mine > factor * usual and mine - usual > max(LEAST, SHARE * share.step):
                found.append((mine - usual, Straggler(rank, cause, mine, usual)))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def starved(shares: Sequence[Share]) -> float:
    """Seconds of a step in which every rank waits for data; 0 where that is not worth a word."""
    least = min((share.data for share in shares), default=0.0)
    step = median(share.step for share in shares) if shares else 0.0
    return least if least > max(4 * SHARE * step, LEAST) else 0.0


class Notes:
    """What of that is worth a word: a rank that is slow in two looks in a row, once, and when that is over.

    A busy system slows down one rank or the other for a moment, and nobody can do anything about it.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._told: int | None = None
        self._starved = False

    def notes(self, slow: Straggler | None, starved: float, position: Callable[[int], str]) -> list[str]:
        rank, found = None if slow is None else slow.rank, []
        if slow is not None and rank == self._before and rank != self._told:
            found.append(slow.told(position(slow.rank)))
            self._told = rank
        elif self._told not in (None, rank, self._before):
            found.append(f"rank {self._told} ({position(self._told or 0)}) is as fast as the others again")
            self._told = None
        if starved and not self._starved:
            found.append(f"all ranks wait for data: {_ms(starved)} of each step")
        self._before, self._starved = rank, bool(starved)
        return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
