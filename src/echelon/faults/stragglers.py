"""Stragglers: the slow rank, although every rank's steps take equally long, since all wait at the next collective.

A rank's step is split into waiting for other ranks (which the flight recorder measures), waiting for data, and the
rest, which is its own work. Ranks of one pipeline stage do the same work; a stage of one rank is compared with other
stages, which is a weaker measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

SLOWDOWN = 1.25
"""a straggler's work over that of its peers, at least"""
SLOWDOWN_ACROSS_STAGES = 2.0
"""the same against ranks of other pipeline stages, whose work differs"""
MIN_STALL_SHARE = 0.05
"""share of a step that a stall must cost"""
MIN_STALL_S = 1e-3
"""seconds of a step that a stall must cost"""


@dataclass(frozen=True)
class RankStepTime:
    """Seconds of one rank's mean step, by what it does."""

    work: float
    data: float
    waiting: float

    @property
    def step(self) -> float:
        return self.work + self.data + self.waiting


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    cause: str
    """`work` or `data`"""
    seconds: float
    """per step"""
    usual: float
    """the median of its peers"""

    def description(self, position: str) -> str:
        name = f"rank {self.rank} ({position})" if position else f"rank {self.rank}"
        times = f", {self.seconds / self.usual:.1f} x" if self.usual > MIN_STALL_S else ""
        does = "works" if self.cause == "work" else "waits for data"
        peers = f"its peers {_format_ms(self.usual)}{times}"
        return f"{name} is slow: it {does} {_format_ms(self.seconds)} of each step, {peers}; the others wait for it"


def find_straggler(step_times: Sequence[RankStepTime], stages: Sequence[int]) -> Straggler | None:
    """Find the rank that costs the others most time. `stages` are the pipeline stages of the ranks."""
    stragglers = []
    for rank, share in enumerate(step_times):
        for cause in ("work", "data"):
            alike = [getattr(s, cause) for r, s in enumerate(step_times) if r != rank and stages[r] == stages[rank]]
            others = alike or [getattr(s, cause) for r, s in enumerate(step_times) if r != rank]
            if not others:
                continue
            usual, mine = median(others), getattr(share, cause)
            factor = SLOWDOWN if alike or cause == "data" else SLOWDOWN_ACROSS_STAGES
            if mine > factor * usual and mine - usual > max(MIN_STALL_S, MIN_STALL_SHARE * share.step):
                stragglers.append((mine - usual, Straggler(rank, cause, mine, usual)))
    return max(stragglers, key=lambda pair: pair[0])[1] if stragglers else None


def data_starvation(step_times: Sequence[RankStepTime]) -> float:
    """Seconds of a step in which every rank waits for data; 0 where they are negligible."""
    least = min((share.data for share in step_times), default=0.0)
    step = median(share.step for share in step_times) if step_times else 0.0
    return least if least > max(4 * MIN_STALL_SHARE * step, MIN_STALL_S) else 0.0


class StragglerReporter:
    """Reports a rank that is slow in two measurements in a row, once, and when it is fast again.

    A busy system slows down some rank for a moment; that is not reported.
    """

    def __init__(self) -> None:
        self._previous: int | None = None
        self._reported: int | None = None
        self._starved = False

    def report(self, slow: Straggler | None, starved: float, position: Callable[[int], str]) -> list[str]:
        rank, notes = None if slow is None else slow.rank, []
        if slow is not None and rank == self._previous and rank != self._reported:
            notes.append(slow.description(position(slow.rank)))
            self._reported = rank
        elif self._reported not in (None, rank, self._previous):
            notes.append(f"rank {self._reported} ({position(self._reported or 0)}) is as fast as the others again")
            self._reported = None
        if starved and not self._starved:
            notes.append(f"all ranks wait for data: {_format_ms(starved)} of each step")
        self._previous, self._starved = rank, bool(starved)
        return notes


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
