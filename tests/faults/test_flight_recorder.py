"""The flight recorder: readable by other processes, writable from any thread, cheap."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from echelon.faults.flight_recorder import FlightRecorder, RecordedWork
from echelon.faults.recorder_entry import BUFFER_BYTES, NUM_SLOTS, format_ranks, parse_ranks, read_entries, read_phase


class Work:
    def __init__(self, seconds: float = 0.0, error: str = ""):
        self.seconds, self.error = seconds, error

    def wait(self) -> None:
        time.sleep(self.seconds)
        if self.error:
            raise RuntimeError(self.error)


def test_an_operation_is_recorded_from_start_to_end() -> None:
    recorder = FlightRecorder()
    recorder.step = 7
    recorder.enter_phase("backward")
    lane = recorder.new_sequence((0, 2))
    slot = recorder.record_start("all_reduce", "dp", lane, (4, 8), "torch.float32")
    (entry,) = recorder.entries()
    assert (entry.flag, entry.op, entry.axis, entry.number, entry.peers) == ("s", "all_reduce", "dp", 1, (0, 2))
    assert (entry.shape, entry.dtype, entry.step, entry.phase) == ("[4, 8]", "float32", 7, "backward")
    assert entry.site.startswith("faults/test_flight_recorder.py:")
    assert entry.site.rpartition(":")[2].isdigit()
    begun = time.time()
    RecordedWork(recorder, slot, Work(0.02)).wait()
    elapsed = time.time() - begun
    (entry,) = recorder.entries()
    assert entry.flag == "e"
    assert entry.start_time <= entry.wait_start <= entry.end_time
    assert 0.02 <= recorder.wait_s <= elapsed


def test_a_failed_wait_stays_pending() -> None:
    recorder = FlightRecorder()
    slot = recorder.record_start("all_gather", "tp", recorder.new_sequence((0, 1)))
    with pytest.raises(RuntimeError, match="peer"):
        RecordedWork(recorder, slot, Work(error="lost peer")).wait()
    assert recorder.entries()[0].flag == "f"
    assert recorder.entries()[0].is_pending


def test_the_buffer_has_a_fixed_size_and_keeps_the_newest_entries() -> None:
    recorder = FlightRecorder()
    lane = recorder.new_sequence((0, 1))
    slots = [recorder.record_start("all_reduce", "dp", lane, (n,), "torch.float32") for n in range(3 * NUM_SLOTS)]
    assert [entry.number for entry in recorder.entries()] == list(range(2 * NUM_SLOTS + 1, 3 * NUM_SLOTS + 1))
    recorder.record_end(slots[0], time.time())  # a later operation has taken its slot
    assert all(entry.flag == "s" for entry in recorder.entries())


def test_threads_record_concurrently() -> None:
    recorder, lanes, each = FlightRecorder(), [], 500
    for number in range(4):
        lanes.append(recorder.new_sequence((number, 9)))

    def work(number: int) -> None:
        for _ in range(each):
            RecordedWork(recorder, recorder.record_start("all_reduce", f"axis{number}", lanes[number]), Work()).wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    read = 0
    while any(thread.is_alive() for thread in threads):
        for entry in recorder.entries():  # a reader never sees half of one
            assert entry.axis == f"axis{entry.peers[0]}"
            read += 1
    for thread in threads:
        thread.join()
    assert read
    assert [lane.last_number for lane in lanes] == [each] * 4
    found = recorder.entries()
    assert len(found) == NUM_SLOTS
    assert all(entry.flag == "e" for entry in found)
    for lane in lanes:
        numbers = [entry.number for entry in found if entry.sequence == lane.name]
        assert len(set(numbers)) == len(numbers)


def test_the_recorder_survives_sigkill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from echelon.faults.flight_recorder import FlightRecorder
recorder = FlightRecorder()
recorder.map_to_file(Path({str(tmp_path / "ring")!r}))
recorder.step = 3
recorder.enter_phase("forward")
slot = recorder.record_start("all_reduce", "dp", recorder.new_sequence((0, 1)), (5,), "torch.bfloat16")
recorder.record_wait(slot)
os.kill(os.getpid(), signal.SIGKILL)
"""
    begun = time.time()
    done = subprocess.run([sys.executable, "-c", code], timeout=300, env=dict(os.environ))
    assert done.returncode == -9
    written = (tmp_path / "ring").read_bytes()
    assert len(written) == BUFFER_BYTES
    (entry,) = read_entries(written)
    assert (entry.flag, entry.description, entry.shape) == ("w", "all_reduce number 1 on axis dp", "[5]")
    step, since, phase = read_phase(written)
    assert (step, phase) == (3, "forward")
    assert begun <= since <= time.time()


def test_the_longest_wait_of_p2p_runs_from_the_call_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    recorder = FlightRecorder()
    assert recorder.longest_wait() == 0.0
    lane = recorder.new_sequence((0, 1))
    message = recorder.record_start("receive", "pp", lane, peers="1")
    collective = recorder.record_start("all_reduce", "dp", lane)
    now[0] += 0.3
    recorder.record_wait(message)
    recorder.record_wait(collective)
    assert recorder.longest_wait() == 0.0  # too short to count
    now[0] += 0.55
    assert recorder.longest_wait() > 0.8
    recorder.record_end(collective, time.time())
    assert 0.5 < recorder.longest_wait() < 0.8


def test_data_loading_and_evaluation_are_not_work() -> None:
    recorder = FlightRecorder()
    with recorder.data_loading():
        time.sleep(0.02)
        assert recorder.phase == "data"
    assert recorder.phase == "start"
    assert recorder.data_wait_s >= 0.02
    loaded = recorder.data_wait_s
    with recorder.phase_scope("evaluation"):
        recorder.enter_phase("forward")
        assert recorder.phase == "evaluation"
        with recorder.data_loading():
            time.sleep(0.01)
    assert recorder.data_wait_s == loaded


def test_an_operation_costs_few_calls() -> None:
    """The recorder is always on: count the Python calls of an operation, which do not depend on the load."""
    recorder, calls = FlightRecorder(), 0
    lane = recorder.new_sequence((0, 1))

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    RecordedWork(recorder, recorder.record_start("all_reduce", "dp", lane, (4,), "torch.float32"), Work()).wait()
    sys.setprofile(count)
    try:
        RecordedWork(recorder, recorder.record_start("all_reduce", "dp", lane, (4,), "torch.float32"), Work()).wait()
    finally:
        sys.setprofile(None)
    assert calls < 40


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (3, 1), tuple(range(0, 64, 2)), (0, 1, 5, 6, 9)])
def test_ranks_round_trip_as_text(ranks: tuple[int, ...]) -> None:
    assert parse_ranks(format_ranks(ranks)) == ranks
    assert len(format_ranks(tuple(range(0, 16384, 8)))) < 16


def test_sequences_of_the_same_ranks_have_distinct_names() -> None:
    recorder = FlightRecorder()
    names = [
        recorder.new_sequence((0, 1)).name,
        recorder.new_sequence((0, 1)).name,
        recorder.new_sequence((0, 1), " channel 1").name,
    ]
    assert len(set(names)) == 3
    assert FlightRecorder().new_sequence((0, 1)).name == names[0]
