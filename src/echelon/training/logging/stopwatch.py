"""Step times, where a step may be queued before the previous one has ended.

    queued    |--1--|--2--|   |--3--|          a step is queued while the previous one executes,
    executed     |-----1-----|-----2-----|-----3-----|
    read                      ^1          ^2          ^3     so steps are timed from one end to the next

If no step is in flight when a step begins, its time counts from there: the gap belongs to no step.
"""

from __future__ import annotations

import time


class StepStopwatch:
    """Times steps from the end of one to the end of the next."""

    def __init__(self) -> None:
        self._num_in_flight = 0
        self._interval_start = 0.0

    def begin(self) -> None:
        """Begin a step, perhaps behind others."""
        if not self._num_in_flight:
            self._interval_start = time.perf_counter()
        self._num_in_flight += 1

    def end(self, count: int = 1) -> float:
        """End the `count` oldest steps in flight; return the seconds of each, which is their mean."""
        now = time.perf_counter()
        seconds, self._interval_start = now - self._interval_start, now
        self._num_in_flight -= count
        return seconds / max(count, 1)
