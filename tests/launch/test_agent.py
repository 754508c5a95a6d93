"""What the launcher does when torch's agent tells it something."""

from __future__ import annotations

import signal

import pytest

from echelon.launch import scratch_dir
from echelon.launch.elastic_agent import Told
from echelon.launch.rank_failure import Failure, RankError


@pytest.fixture
def told(tmp_path):
    def error_of(seen, attempt):
        return RankError.of(Failure.of_exit(-9, 1), world=2, what="training")

    before = signal.getsignal(signal.SIGTERM)
    yield Told(tmp_path, error_of, None, stoppable=True)
    signal.signal(signal.SIGTERM, before)


def is_told(folder, attempt: int) -> bool:
    return (scratch_dir.of_attempt(folder, attempt) / scratch_dir.FAULTS / f"{scratch_dir.STOP}.txt").exists()


def test_ranks_that_are_under_way_are_told_to_stop(told, tmp_path):
    told.started()
    signal.raise_signal(signal.SIGTERM)
    assert is_told(tmp_path, 0)
    with pytest.raises(RankError):
        told.failed({})  # no restart of what is to stop


def test_ranks_that_are_started_after_the_signal_are_told_too(told, tmp_path):
    """It came between a failure and the restart: the word was left for ranks that were gone, and the run went on."""
    told.started()
    told.failed({})
    signal.raise_signal(signal.SIGTERM)
    told.started()
    assert is_told(tmp_path, 1)
