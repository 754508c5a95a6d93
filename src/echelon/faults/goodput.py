"""Goodput: the share of a run's time that became training.

Useful is the time of steps that were kept. A step is lost where it updated nothing, or where it was done again: after a
restart, or after the run went back from a spike of its loss. A run's log has all that is needed, over all its attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunGoodput:
    """Seconds, of rank 0."""

    wall_s: float
    """since the run first started, time between attempts included"""
    useful_s: float
    """of steps that were kept"""
    lost_s: float
    """of steps that were not"""
    lost_steps: int
    waiting_s: float
    """of useful time, waiting for other ranks"""
    data_s: float
    """of useful time, waiting for data"""
    restarts: int

    @property
    def share(self) -> float:
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def record(self) -> dict[str, float]:
        return asdict(self)

    def summary(self) -> str:
        parts = [f"{100 * self.share:.1f} % of it in steps that were kept"]
        if self.useful_s > 0:
            parts.append(f"{100 * self.waiting_s / self.useful_s:.0f} % of those waiting for other ranks")
        if self.lost_steps:
            parts.append(f"{self.lost_steps} step{'s' if self.lost_steps > 1 else ''} lost ({self.lost_s:.1f} s)")
        if self.restarts:
            parts.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        return ", ".join(parts)


def measure_goodput(records: Iterable[Mapping[str, Any]], *, end_time: float) -> RunGoodput:
    """From the lines of a run's log: its `start`s, `rollback`s and `step`s. `now` is the end, in seconds since 1970."""
    began, attempts = end_time, 0
    kept: dict[int, Mapping[str, Any]] = {}
    lost: list[Mapping[str, Any]] = []
    for record in records:
        if record["kind"] == "start":
            began = min(began, float(record["time"]))
            attempts += 1
        if record["kind"] in ("start", "rollback"):
            # What was done after the step from which the run goes on is done again.
            lost += [kept.pop(step) for step in [*kept] if step > int(record["after"])]
        elif record["kind"] == "step":
            if record["skipped"]:
                lost.append(record)
            else:
                kept[int(record["step"])] = record
    return RunGoodput(
        wall_s=end_time - began,
        useful_s=_sum(kept.values(), "seconds"),
        lost_s=_sum(lost, "seconds"),
        lost_steps=len(lost),
        waiting_s=_sum(kept.values(), "waiting"),
        data_s=_sum(kept.values(), "data"),
        restarts=max(attempts - 1, 0),
    )


def _sum(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(float(record.get(name, 0.0)) for record in records))
