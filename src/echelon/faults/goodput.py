"""Goodput: the share of a run's wall time that became training.

Useful time is that of steps whose update counts. A step is lost if it was skipped, or repeated after a restart or
after a rollback from a loss spike. The run's log covers all attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunGoodput:
    """Goodput of a run and its parts, in seconds of rank 0."""

    wall_s: float
    """since the run first started, including the time between attempts"""
    useful_s: float
    """of steps whose update counts"""
    lost_s: float
    """of steps that were skipped or repeated"""
    lost_steps: int
    waiting_s: float
    """of useful time, waiting for other ranks"""
    data_s: float
    """of useful time, waiting for data"""
    restarts: int

    @property
    def share(self) -> float:
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def summary(self) -> str:
        parts = [f"{100 * self.share:.1f} % goodput"]
        if self.useful_s > 0:
            parts.append(f"{100 * self.waiting_s / self.useful_s:.0f} % of it waiting for other ranks")
        if self.lost_steps:
            parts.append(f"{self.lost_steps} step{'s' if self.lost_steps > 1 else ''} lost ({self.lost_s:.1f} s)")
        if self.restarts:
            parts.append(f"{self.restarts} restart{'s' if self.restarts > 1 else ''}")
        return ", ".join(parts)


def measure_goodput(records: Iterable[Mapping[str, Any]], *, end_time: float) -> RunGoodput:
    """Compute goodput from the `start`, `rollback` and `step` events of a run's log, up to `end_time` (Unix time)."""
    start_time, attempts = end_time, 0
    useful: dict[int, Mapping[str, Any]] = {}
    lost: list[Mapping[str, Any]] = []
    for record in records:
        if record["kind"] == "start":
            start_time = min(start_time, float(record["time"]))
            attempts += 1
        if record["kind"] in ("start", "rollback"):
            # Steps after the one that the run resumes from are repeated.
            lost += [useful.pop(step) for step in [*useful] if step > int(record["after"])]
        elif record["kind"] == "step":
            if record["skipped"]:
                lost.append(record)
            else:
                useful[int(record["step"])] = record
    return RunGoodput(
        wall_s=end_time - start_time,
        useful_s=_sum(useful.values(), "seconds"),
        lost_s=_sum(lost, "seconds"),
        lost_steps=len(lost),
        waiting_s=_sum(useful.values(), "waiting"),
        data_s=_sum(useful.values(), "data"),
        restarts=max(attempts - 1, 0),
    )


def _sum(records: Iterable[Mapping[str, Any]], name: str) -> float:
    return float(sum(float(record.get(name, 0.0)) for record in records))
