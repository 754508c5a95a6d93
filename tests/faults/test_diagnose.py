"""Diagnoses and reports of hand-written rank states, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.faults.diagnose import diagnose
from echelon.faults.failure_report import diagnosis_record, format_diagnosis
from echelon.faults.host_memory import HostMemory
from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import RecorderEntry

NOW = 1000.0
GIB = 2**30


class Rank:
    """A rank's history, written by hand."""

    def __init__(self, rank, world=4, position=""):
        self.rank, self.world = rank, world
        self.position = position or f"dp {rank}"
        self.entries, self.numbers = [], {}

    def did(
        self, op="all_reduce", flag="e", *, axis="dp", peers=None, shape="[8]", site="a.py:1", lane="", since=990.0
    ):
        peers = tuple(range(self.world)) if peers is None else peers
        lane = lane or axis
        self.numbers[lane] = self.numbers.get(lane, 0) + 1
        order = len(self.entries)
        times = (since - 1, since if flag in "wf" else 0.0, NOW - 1 if flag in "ef" else 0.0)
        made = RecorderEntry(
            flag, order, *times, op, axis, lane, self.numbers[lane], peers, shape, "float32", site, 3, "backward"
        )
        self.entries.append(made)
        return self

    def state(self, **changes):
        base = RankState(
            rank=self.rank,
            mesh_position=self.position,
            host="h",
            pid=10 + self.rank,
            heartbeat_time=NOW - 0.2,
            step=3,
            phase="data",
            phase_start=NOW - 6,
            stack=("loader.py:12 in fetch", "loop.py:9 in run"),
            sequences={lane: (number, tuple(range(self.world))) for lane, number in self.numbers.items()},
            entries=tuple(self.entries),
        )
        return replace(base, **changes)


def reported(states):
    verdict = diagnose(states)
    return verdict, format_diagnosis(verdict, states, now=NOW)


def test_an_absent_rank_is_named_with_all_waiting_ranks():
    ranks = [Rank(r).did() for r in range(4)]
    states = [r.did(flag="w", site="b.py:2").state() if r.rank != 2 else r.state() for r in ranks]
    verdict, text = reported(states)
    assert (verdict.case, verdict.culprits) == ("absent", (2,))
    assert [rank for rank, _ in verdict.waiting] == [0, 1, 3]
    for fact in (
        "rank 2 (dp 2) did not reach all_reduce number 2 on axis dp (float32 [8], called at b.py:2",
        "step 3",
        "It has been in data of step 3 for 6.0 s",
        "loader.py:12 in fetch < loop.py:9 in run",
        "Its last operation was all_reduce number 1 on axis dp",
        "rank 0 (dp 0) for 10.0 s in all_reduce number 2 on axis dp at b.py:2",
    ):
        assert fact in text
    assert "\n" not in text
    assert diagnosis_record(verdict, text)["waiting"] == [0, 1, 3]


def test_two_absent_ranks_are_both_named():
    states = [Rank(r).did(flag="w").state() if r < 2 else Rank(r).state() for r in range(4)]
    verdict, text = reported(states)
    assert verdict.culprits == (2, 3)
    assert "rank 2 (dp 2) and rank 3 (dp 3) did not reach" in text


def test_the_end_of_a_chain_of_waits_is_the_culprit():
    # 0 waits for 1 on tp, 1 waits for 3 on dp, 3 sleeps; 2 waits for 3 on tp.
    zero = Rank(0).did(flag="w", axis="tp", lane="0,1", peers=(0, 1))
    one = Rank(1).did(flag="w", lane="1,3", peers=(1, 3))
    two = Rank(2).did(flag="w", axis="tp", lane="2,3", peers=(2, 3))
    verdict, text = reported([zero.state(), one.state(), two.state(), Rank(3).state()])
    assert (verdict.case, verdict.culprits) == ("absent", (3,))
    assert "rank 0 (dp 0)" in text
    assert verdict.operation.sequence in ("1,3", "2,3")


def test_a_stage_that_does_not_send_is_named():
    lane = "0,1 channel 0"
    waits = (
        Rank(1, 2)
        .did("receive", axis="pp", lane=lane, peers=(0,))
        .did("receive", "w", axis="pp", lane=lane, peers=(0,))
    )
    sends = Rank(0, 2).did("send", axis="pp", lane=lane, peers=(1,))
    verdict, text = reported([sends.state(), waits.state()])
    assert (verdict.case, verdict.culprits) == ("absent", (0,))
    assert "did not send what another rank waits for: receive number 2 on axis pp" in text


def test_a_skipped_operation_is_found_by_the_next_one():
    def history(rank, skips):
        r = Rank(rank, 3)
        r.did(site="a.py:1").did("all_gather", site="b.py:2", shape="[4]")
        if not skips:
            r.did("reduce_scatter", site="c.py:3", shape="[6]")
        return r.did("all_reduce", "w" if skips else "s", site="d.py:4", shape="[2]")

    ranks = [history(0, False), history(1, True), history(2, False)]
    verdict, text = reported([r.state() for r in ranks])
    assert (verdict.case, verdict.culprits) == ("skipped", (1,))
    assert "rank 1 (dp 1) skipped reduce_scatter number 3 on axis dp (float32 [6], called at c.py:3" in text
    assert "operation number 3 is all_reduce (float32 [2], d.py:4)" in text


def test_of_two_ranks_the_one_that_skipped_is_known_from_the_steps_before():
    def history(rank, skips):
        r = Rank(rank, 2)
        for _ in range(2):
            r.did(site="a.py:1").did("all_gather", site="b.py:2")
        if skips:
            return r.did("all_gather", "w", site="b.py:2")
        return r.did("all_reduce", "w", site="a.py:1")

    verdict, text = reported([history(0, False).state(), history(1, True).state()])
    assert (verdict.case, verdict.culprits) == ("skipped", (1,))
    assert "skipped all_reduce number 5" in text


def test_different_shapes_are_a_mismatch():
    states = [Rank(r).did(flag="w", shape="[9]" if r == 3 else "[8]").state() for r in range(4)]
    verdict, text = reported(states)
    assert (verdict.case, verdict.culprits) == ("disagree", (3,))
    assert "all_reduce (float32 [8], a.py:1), and all_reduce (float32 [9], a.py:1)" in text


def test_sizes_of_an_all_to_all_may_differ():
    states = [Rank(r).did("all_to_all", shape=f"[{r}]").did(flag="w").state() for r in range(3)]
    assert diagnose([*states, Rank(3).did("all_to_all", shape="[7]").state()]).culprits == (3,)


def test_ranks_that_wait_in_a_cycle():
    zero = Rank(0, 2).did(flag="w", axis="tp", lane="tp")
    one = Rank(1, 2).did(flag="w", axis="dp", lane="dp")
    verdict, text = reported([zero.state(), one.state()])
    assert (verdict.case, verdict.culprits) == ("circle", (0, 1))
    assert "axis tp" in text
    assert "axis dp" in text


def test_the_first_rank_that_raised_is_the_culprit():
    states = [
        Rank(0)
        .did(flag="f")
        .state(exit_kind="raised", exit_reason="RuntimeError: peer", lost_peer=True, exit_time=1.0),
        Rank(1).state(exit_kind="raised", exit_reason="ValueError: no", exit_time=3.0),
        Rank(2).state(exit_kind="raised", exit_reason="ValueError: first", exit_time=2.0),
        Rank(3).did(flag="w").state(),
    ]
    verdict, text = reported(states)
    assert (verdict.case, verdict.culprits) == ("raised", (2,))
    assert "rank 2 (dp 2) raised ValueError: first, in data of step 3." in text
    assert [rank for rank, _ in verdict.waiting] == [0, 3]


@pytest.mark.parametrize(
    ("used", "words"), [(15, "probably killed for running out of memory"), (3, "probably not for running out")]
)
def test_a_killed_rank_is_reported_with_signal_and_memory(used, words):
    memory = HostMemory(rank_bytes=2 * GIB, used_bytes=used * GIB, limit_bytes=16 * GIB)
    ending = "the process was ended by SIGKILL"
    states = [Rank(0, 2).did(flag="w").state(), Rank(1, 2).state(exit_kind="killed", exit_reason=ending, memory=memory)]
    verdict, text = reported(states)
    assert verdict.case == "killed"
    assert f"2.00 GiB in the rank, {used}.00 GiB of 16.00 GiB on its host" in text
    assert words in text
    assert "SIGKILL" in text


def test_missing_heartbeats_are_reported():
    states = [Rank(0, 2).did(flag="w").state(), Rank(1, 2).state(heartbeat_time=NOW - 30)]
    assert "Its last heartbeat was 30.0 s ago" in reported(states)[1]


def test_a_lost_rank_is_reported_with_its_last_heartbeat():
    # Under torchrun the exit code is unknown: the rank that lost the peer reports before it is ended too.
    failed = (
        Rank(0, 2).did(flag="f").state(exit_kind="raised", exit_reason="RuntimeError: closed by peer", lost_peer=True)
    )
    verdict, text = reported([failed, Rank(1, 2).state()])
    assert (verdict.case, verdict.culprits) == ("absent", (1,))
    assert "and the connection to it broke. At its last heartbeat, 0.2 s ago, it was in data of step 3." in text


def test_a_rank_that_never_published_a_heartbeat():
    verdict, text = reported([Rank(0, 2).did(flag="w").state(), RankState(rank=1)])
    assert verdict.culprits == (1,)
    assert "It never published a heartbeat" in text


def test_many_ranks_fit_in_a_paragraph():
    world = 2000
    states = [Rank(r, world).did(flag="w", peers=tuple(range(world))).state() for r in range(1, world)]
    verdict, text = reported([Rank(0, world).state(), *states])
    assert verdict.culprits == (0,)
    assert "and 1991 more" in text
    assert len(text) < 2500


def test_rank_states_round_trip_as_json():
    state = (
        Rank(1).did().did("send", "w", peers=(0,)).state(memory=HostMemory(rank_bytes=1, used_bytes=2, limit_bytes=3))
    )
    assert RankState.from_json(state.to_json()) == state
    assert RankState.from_json(state.to_json(entries=False)) == replace(state, entries=())
