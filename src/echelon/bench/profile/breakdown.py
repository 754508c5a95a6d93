"""Where the time of a step goes, as data that a file can hold: pictures and tables are made from it alone. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One category of a step."""

    name: str
    seconds: float
    """measured, of one step"""
    floor_s: float
    """what it would take at the least"""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    name: str
    part: str
    calls: float
    """in one step"""
    seconds: float
    """of one step"""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """One step, looked into."""

    shape: str
    seq: int
    batch: int
    precision: str
    recompute: str
    states: str
    device: str
    torch: str
    step_s: float
    """of a step that nobody looked into, the median"""
    copy: float
    """bytes per second of a copy, by which the fewest bytes become seconds"""
    parts: tuple[StepPart, ...]
    """of the steps that were looked into; with the idle time they make up the whole"""
    kernels: tuple[KernelTime, ...]
    """the longest, by name"""

    @property
    def total(self) -> float:
        """Seconds of a step that was looked into."""
        return sum(part.seconds for part in self.parts)

    @property
    def floor(self) -> float:
        return sum(part.floor_s for part in self.parts)


def to_json(breakdowns: Sequence[Breakdown]) -> dict[str, Any]:
    return {"profiles": [asdict(one) for one in breakdowns]}


def from_json(text: str) -> list[Breakdown]:
    return [from_dict(one) for one in json.loads(text)["profiles"]]


def from_dict(values: dict[str, Any]) -> Breakdown:
    """From the values of one profile."""
    parts = tuple(StepPart(**part) for part in values["parts"])
    kernels = tuple(KernelTime(**kernel) for kernel in values["kernels"])
    return Breakdown(**{**values, "parts": parts, "kernels": kernels})
