"""Seconds per kernel and idle time from a trace of torch's profiler.

Kernels on several streams may overlap. Overlapping kernels share the time equally, so that all kernels and the idle
time add up to the elapsed time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""the profiler's categories of events that take time on a GPU"""


@dataclass(frozen=True, kw_only=True)
class KernelSpan:
    """One execution of a kernel."""

    name: str
    start: float
    end: float
    """seconds"""


@dataclass(frozen=True, kw_only=True)
class TraceShares:
    """The time of a trace by kernel."""

    seconds: dict[str, float]
    """by kernel"""
    calls: dict[str, int]
    idle: float


def kernel_spans(trace: Mapping[str, Any]) -> list[KernelSpan]:
    """The kernels of a trace by `export_chrome_trace`, whose times are in microseconds."""
    return [
        KernelSpan(name=event["name"], start=event["ts"] / 1e6, end=(event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("cat") in DEVICE_CATEGORIES
    ]


def share_time(spans: Sequence[KernelSpan]) -> TraceShares:
    """Divide the time from the first start to the last end among the kernels."""
    seconds: defaultdict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    idle, last = 0.0, 0.0
    for when, change, name in _events(spans):
        passed, busy = when - last, running.total()
        if busy:
            for other, count in running.items():
                seconds[other] += passed * count / busy
        elif last:
            idle += passed
        running[name] += change
        if not running[name]:
            del running[name]
        last = when
    return TraceShares(seconds=dict(seconds), calls=dict(Counter(span.name for span in spans)), idle=idle)


def _events(spans: Iterable[KernelSpan]) -> list[tuple[float, int, str]]:
    """(time, +1 at a start or -1 at an end, kernel) in order; ends before starts of the same time."""
    both = [((span.start, 1, span.name), (span.end, -1, span.name)) for span in spans if span.end > span.start]
    return sorted(change for pair in both for change in pair)
