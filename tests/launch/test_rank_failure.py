from __future__ import annotations

import pickle

from echelon.launch.rank_failure import RankError, RankFailure, first_failure


def caught(error: Exception, rank: int = 0) -> RankFailure:
    try:
        raise error
    except Exception as error:
        return RankFailure.from_exception(error, rank)


def test_a_consequence_is_not_the_first_failure() -> None:
    consequence = caught(RuntimeError("Connection closed by peer [127.0.0.1]:14736"), 0)
    cause = caught(ValueError("no luck"), 1)
    later = caught(ValueError("no luck either"), 2)
    assert first_failure([later, consequence, cause]) is cause
    assert first_failure([consequence]) is consequence


def test_an_error_raised_while_a_lost_peer_is_handled_is_a_consequence() -> None:
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError("Timed out waiting 2000ms for recv operation to complete")
    assert caught(wrapped).lost_peer
    unplanned = ValueError("the step failed")
    unplanned.__context__ = RuntimeError("Connection reset by peer")
    assert caught(unplanned).lost_peer
    assert not caught(ValueError("the step failed")).lost_peer


def test_an_exit_is_described_by_signal_or_exit_code() -> None:
    assert "SIGSEGV" in RankFailure.from_exit_code(-11, 0).reason
    assert "signal 99" in RankFailure.from_exit_code(-99, 0).reason
    assert "exit code 3" in RankFailure.from_exit_code(3, 0).reason


def test_the_error_survives_pickling() -> None:
    error = RankError.from_failure(caught(ValueError("no luck"), 1), world_size=2, function="room.function")
    back = pickle.loads(pickle.dumps(error))
    assert back.failure == error.failure
    assert (str(back), back.rank, back.reason) == (str(error), 1, "ValueError: no luck")
