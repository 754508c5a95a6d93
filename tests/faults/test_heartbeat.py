"""Heartbeats and the diagnosis of a hang over both state stores: one report, by one rank, before the timeout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_clock import ALWAYS, patient

from echelon.faults.diagnose import Diagnosis
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.heartbeat import CULPRIT_KEY, DIAGNOSIS_KEY, Heartbeat, diagnosis_delay, heartbeat_interval
from echelon.faults.rank_state import capture_rank_state
from echelon.faults.state_store import C10dStateStore, FileStateStore, StateStore


@pytest.fixture(params=["files", "store"])
def board(request: Any, tmp_path: Path) -> Iterator[StateStore]:
    if request.param == "files":
        yield FileStateStore(tmp_path)
        return
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield C10dStateStore(PrefixStore("run", store).clone())
    del store  # it serves until here


def test_one_rank_diagnoses_the_hang_once(board: StateStore) -> None:
    reported: list[tuple[Diagnosis, str]] = []
    timeout = patient(1.5)
    recorders = [FlightRecorder() for _ in range(3)]
    for rank, recorder in enumerate(recorders):
        if isinstance(board, FileStateStore):
            recorder.map_to_file(board.recorder_path(rank))
        recorder.mesh_position = f"dp {rank}"
        recorder.step = 5
        recorder.enter_phase("data" if rank == 2 else "backward")
    lanes = [recorder.new_sequence((0, 1, 2)) for recorder in recorders]
    hearts = [
        Heartbeat(
            recorder,
            board,
            rank=rank,
            world_size=3,
            timeout=timeout,
            on_diagnosis=lambda *found: reported.append(found),
        )
        for rank, recorder in enumerate(recorders)
    ]
    for heart in hearts:
        heart.start()
    begun = time.time()
    for rank in (0, 1):
        recorders[rank].record_wait(
            recorders[rank].record_start("all_reduce", "dp", lanes[rank], (8,), "torch.float32")
        )
    while not reported and time.time() - begun < ALWAYS:
        time.sleep(0.05)
    time.sleep(0.5)  # the other ranks report nothing
    for heart in hearts:
        heart.stop()
    ((verdict, text),) = reported
    assert (verdict.case, verdict.culprits) == ("absent", (2,))
    assert [rank for rank, _ in verdict.waiting] == [0, 1]
    assert text == board.get(DIAGNOSIS_KEY)
    assert board.get(CULPRIT_KEY) == "2"
    assert (
        "rank 2 (dp 2) did not reach all_reduce number 1 on axis dp (float32 [8], called at faults/test_heartbeat.py:"
        in text
    )
    assert "It has been in data of step 5" in text


def test_published_texts_are_read_back(board: StateStore) -> None:
    recorder = FlightRecorder()
    if isinstance(board, FileStateStore):
        recorder.map_to_file(board.recorder_path(0))
    recorder.record_start("all_gather", "tp", recorder.new_sequence((0, 1)), (4,), "torch.float64")
    board.put(capture_rank_state(recorder, 0).with_exit("raised", "ValueError: no"))
    seen, unknown = board.states(2)
    assert (seen.exit_kind, seen.exit_reason, seen.entries[0].op) == ("raised", "ValueError: no", "all_gather")
    assert (unknown.rank, unknown.heartbeat_time) == (1, 0.0)
    assert board.get("nothing") == ""
    assert [board.claim("a"), board.claim("a"), board.claim("b")] == [True, False, True]


@pytest.mark.parametrize("timeout", [0.5, 5.0, 60.0, 600.0, 7200.0])
def test_the_diagnosis_precedes_torchs_timeout(timeout: float) -> None:
    assert 0 < diagnosis_delay(timeout) < timeout
    assert timeout - diagnosis_delay(timeout) <= 5.0
    assert 0.2 <= heartbeat_interval(timeout) <= 5.0
