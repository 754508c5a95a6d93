"""The observer of torch's elastic agent: stop requests and restarts."""

from __future__ import annotations

import signal

import pytest

from echelon.launch import scratch_dir
from echelon.launch.elastic_agent import AgentObserver
from echelon.launch.rank_failure import RankError, RankFailure


@pytest.fixture
def reported(tmp_path):
    def error_of(seen, attempt):
        return RankError.from_failure(RankFailure.from_exit_code(-9, 1), world_size=2, function="training")

    before = signal.getsignal(signal.SIGTERM)
    yield AgentObserver(tmp_path, error_of, None, is_stoppable=True)
    signal.signal(signal.SIGTERM, before)


def is_reported(folder, attempt: int) -> bool:
    return (scratch_dir.attempt_dir(folder, attempt) / scratch_dir.FAULTS_DIR / f"{scratch_dir.STOP_KEY}.txt").exists()


def test_running_ranks_receive_the_stop_request(reported, tmp_path):
    reported.on_start()
    signal.raise_signal(signal.SIGTERM)
    assert is_reported(tmp_path, 0)
    with pytest.raises(RankError):
        reported.on_failure({})  # no restart while stopping


def test_restarted_ranks_receive_the_stop_request(reported, tmp_path):
    """SIGTERM came between a failure and the restart: the request reached only dead ranks, and the run continued."""
    reported.on_start()
    reported.on_failure({})
    signal.raise_signal(signal.SIGTERM)
    reported.on_start()
    assert is_reported(tmp_path, 1)
