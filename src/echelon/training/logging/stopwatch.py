"""How long steps take, where a step may begin before the one before it is known to have ended.

    queued   |--1--|--2--|   |--3--|          a step is queued while its forerunner is at work,
    at work     |-----1-----|-----2-----|-----3-----|
    known                     ^1          ^2          ^3     so steps are timed from one end to the next

Where nothing is under way when a step begins, its time counts from there: what lies between is no part of any step.
"""

from __future__ import annotations

import time


class StepStopwatch:
    def __init__(self) -> None:
        self._num_in_flight = 0
        self._interval_start = 0.0

    def begin(self) -> None:
        """A step begins, perhaps behind others."""
        if not self._num_in_flight:
            self._interval_start = time.perf_counter()
        self._num_in_flight += 1

    def end(self, count: int = 1) -> float:
        """So many of the oldest steps under way have ended: the seconds that each took, evenly where they are several.

        When each of them ended is not known where they are waited for together.
        """
        now = time.perf_counter()
        seconds, self._interval_start = now - self._interval_start, now
        self._num_in_flight -= count
        return seconds / max(count, 1)
