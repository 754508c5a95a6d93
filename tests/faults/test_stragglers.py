"""The straggler is found although all steps take equally long; data stalls are distinguished from work."""

from __future__ import annotations

from echelon.faults.stragglers import RankStepTime, Straggler, StragglerReporter, data_starvation, find_straggler


def shares(*work, data=None):
    """All steps take 100 ms: what is not work or data is waiting."""
    data = data or [0.001] * len(work)
    return [RankStepTime(w, d, 0.1 - w - d) for w, d in zip(work, data, strict=True)]


def test_equal_step_times_hide_no_straggler():
    found = find_straggler(shares(0.03, 0.03, 0.09, 0.031), [0] * 4)
    assert (found.rank, found.cause) == (2, "work")
    assert found.description("dp 2").startswith(
        "rank 2 (dp 2) is slow: it works 90 ms of each step, its peers 30 ms, 3.0 x"
    )


def test_data_stalls_are_distinguished_from_work():
    found = find_straggler(shares(0.03, 0.03, data=[0.001, 0.06]), [0, 0])
    assert (found.rank, found.cause) == (1, "data")
    assert "it waits for data 60 ms of each step" in found.description("dp 1")


def test_no_straggler():
    assert find_straggler(shares(0.030, 0.032, 0.029), [0] * 3) is None
    assert find_straggler(shares(0.0001, 0.0009), [0, 0]) is None
    assert find_straggler(shares(0.05), [0]) is None


def test_one_quick_rank_makes_no_straggler_of_the_others():
    assert find_straggler(shares(0.02, 0.03, 0.03, 0.03), [0] * 4) is None


def test_ranks_are_compared_within_their_stage():
    # The last stage has more work; rank 1 is slow among the ranks of the first stage.
    assert find_straggler(shares(0.03, 0.03, 0.05, 0.05), [0, 0, 1, 1]) is None
    assert find_straggler(shares(0.03, 0.045, 0.05, 0.05), [0, 0, 1, 1]).rank == 1
    assert find_straggler(shares(0.03, 0.05), [0, 1]) is None
    assert find_straggler(shares(0.03, 0.08), [0, 1]).rank == 1


def test_data_stalls_are_compared_across_stages_as_within_one():
    """The work of stages differs; the time in which their data arrives should not."""
    found = find_straggler(shares(0.03, 0.03, data=[0.02, 0.03]), [0, 1])
    assert (found.rank, found.cause) == (1, "data")


def test_all_wait_for_data():
    assert data_starvation(shares(0.03, 0.03, data=[0.05, 0.06])) == 0.05
    assert data_starvation(shares(0.03, 0.03, data=[0.001, 0.06])) == 0.0
    assert data_starvation([]) == 0.0


def test_a_lasting_straggler_is_reported_once():
    notes, slow = StragglerReporter(), Straggler(1, "work", 0.09, 0.03)
    said = [notes.report(found, 0.0, "dp {}".format) for found in (slow, slow, slow, None, None, slow)]
    assert [len(words) for words in said] == [0, 1, 0, 0, 1, 0]
    assert "rank 1 (dp 1) is slow" in said[1][0]
    assert "as fast as the others again" in said[4][0]
    assert len(notes.report(None, 0.05, str)) == 1
    assert notes.report(None, 0.05, str) == []
