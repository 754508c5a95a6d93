"""Steps are timed from one end to the next where they overlap, and what lies between them is no part of any."""

from __future__ import annotations

import pytest

from echelon.training.logging import stopwatch
from echelon.training.logging.stopwatch import StepStopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def test_steps_one_after_the_other(clock: list[float]) -> None:
    watch, found = StepStopwatch(), []
    for seconds in (2.0, 3.0):
        watch.begin()
        clock[0] += seconds
        found.append(watch.end())
        clock[0] += 50.0  # an evaluation
    assert found == [2.0, 3.0]


def test_steps_that_overlap(clock: list[float]) -> None:
    watch = StepStopwatch()
    watch.begin()
    clock[0] += 0.5  # the first is queued
    watch.begin()
    clock[0] += 2.0  # and known when the second is queued
    assert watch.end() == 2.5
    clock[0] += 4.0
    assert watch.end() == 4.0, "from the end of the first"
    clock[0] += 50.0
    watch.begin()
    clock[0] += 1.0
    assert watch.end() == 1.0


def test_steps_that_end_together_share_their_time(clock: list[float]) -> None:
    watch = StepStopwatch()
    for _ in range(2):
        watch.begin()
        clock[0] += 1.0
    clock[0] += 4.0
    assert watch.end(2) == 3.0
    clock[0] += 9.0
    watch.begin()
    clock[0] += 1.0
    assert watch.end() == 1.0
