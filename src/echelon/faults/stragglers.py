"""Who is slow, though all steps take equally long: everybody waits for the slowest at the next collective.

So a rank's step is taken apart: waiting for others (the ring knows), waiting for data, and the rest, which is its own
work. Ranks of one pipeline stage have the same work; where a stage is one rank alone, others are a poorer measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

SLOWDOWN = 1.25
"""how much longer than its peers a slow rank works"""
SLOWDOWN_ACROSS_STAGES = 2.0
"""the same where its peers have other work: stages of a pipeline are not cut evenly"""
MIN_STALL_SHARE = 0.05
"""of a step that a stall must cost"""
MIN_STALL_S = 1e-3
"""seconds of a step that a stall must cost"""


@dataclass(frozen=True)
class RankStepTime:
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

    def description(self, position: str) -> str:
        name = f"rank {self.rank} ({position})" if position else f"rank {self.rank}"
        times = f", {self.seconds / self.usual:.1f} x" if self.usual > MIN_STALL_S else ""
        does = "works" if self.cause == "work" else "waits for data"
        return (
            f"{name} is slow: it {does} {_format_ms(self.seconds)} of each step, its peers {_format_ms(self.usual)}{times}; "
            "the others wait for it"
        )


def find_straggler(step_times: Sequence[RankStepTime], stages: Sequence[int]) -> Straggler | None:
    """The rank that costs the others most, if one does. `stages` are the pipeline stages of the ranks."""
    found = []
    for rank, share in enumerate(step_times):
        for cause in ("work", "data"):
            alike = [getattr(s, cause) for r, s in enumerate(step_times) if r != rank and stages[r] == stages[rank]]
            others = alike or [getattr(s, cause) for r, s in enumerate(step_times) if r != rank]
            if not others:
                continue
            usual, mine = median(others), getattr(share, cause)
            factor = SLOWDOWN if alike or cause == "data" else SLOWDOWN_ACROSS_STAGES
            if mine > factor * usual and mine - usual > max(MIN_STALL_S, MIN_STALL_SHARE * share.step):
                found.append((mine - usual, Straggler(rank, cause, mine, usual)))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def data_starvation(step_times: Sequence[RankStepTime]) -> float:
    """Seconds of a step in which every rank waits for data; 0 where that is not worth a word."""
    least = min((share.data for share in step_times), default=0.0)
    step = median(share.step for share in step_times) if step_times else 0.0
    return least if least > max(4 * MIN_STALL_SHARE * step, MIN_STALL_S) else 0.0


class StragglerReporter:
    """What of that is worth a word: a rank that is slow in two looks in a row, once, and when that is over.

    A busy system slows down one rank or the other for a moment, and nobody can do anything about it.
    """

    def __init__(self) -> None:
        self._previous: int | None = None
        self._reported: int | None = None
        self._starved = False

    def report(self, slow: Straggler | None, starved: float, position: Callable[[int], str]) -> list[str]:
        rank, found = None if slow is None else slow.rank, []
        if slow is not None and rank == self._previous and rank != self._reported:
            found.append(slow.description(position(slow.rank)))
            self._reported = rank
        elif self._reported not in (None, rank, self._previous):
            found.append(f"rank {self._reported} ({position(self._reported or 0)}) is as fast as the others again")
            self._reported = None
        if starved and not self._starved:
            found.append(f"all ranks wait for data: {_format_ms(starved)} of each step")
        self._previous, self._starved = rank, bool(starved)
        return found


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
