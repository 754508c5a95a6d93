"""`Breakdown`: the time of a step by part, as data in a file, from which pictures and tables are made. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One category of kernels in a step."""

    name: str
    seconds: float
    """measured, per step"""
    floor_s: float
    """the lower bound"""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    name: str
    part: str
    calls: float
    """per step"""
    seconds: float
    """per step"""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A profiled step."""

    shape: str
    seq: int
    batch: int
    precision: str
    recompute: str
    states: str
    device: str
    torch: str
    step_s: float
    """the median of steps without the profiler"""
    copy: float
    """the bandwidth of a copy, in bytes per second, which turns minimum bytes into seconds"""
    parts: tuple[StepPart, ...]
    """of the profiled steps; with the idle time they add up to `total`"""
    kernels: tuple[KernelTime, ...]
    """the longest kernels"""

    @property
    def total(self) -> float:
        """Seconds of a profiled step."""
        return sum(part.seconds for part in self.parts)

    @property
    def floor(self) -> float:
        return sum(part.floor_s for part in self.parts)


def to_json(breakdowns: Sequence[Breakdown]) -> dict[str, Any]:
    return {"profiles": [asdict(breakdown) for breakdown in breakdowns]}


def from_json(text: str) -> list[Breakdown]:
    return [from_dict(breakdown) for breakdown in json.loads(text)["profiles"]]


def from_dict(values: dict[str, Any]) -> Breakdown:
    """The breakdown with the values of `asdict`."""
    parts = tuple(StepPart(**part) for part in values["parts"])
    kernels = tuple(KernelTime(**kernel) for kernel in values["kernels"])
    return Breakdown(**{**values, "parts": parts, "kernels": kernels})
