"""All ranks stop after the same step, whichever rank gets SIGTERM; a rank whose peer died exits at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from cpu_clock import ALWAYS

from echelon.faults.graceful_stop import GracefulStop, process_is_alive
from echelon.faults.rank_state import RankState
from echelon.faults.state_store import FileStateStore
from echelon.launch.scratch_dir import STOP_KEY, request_stop


@pytest.fixture
def board(tmp_path):
    return FileStateStore(tmp_path / "faults")


def ranks(board, count=2, late=False):
    found = [GracefulStop(board, rank=rank, world_size=count, handles_signals=False) for rank in range(count)]
    for one in found:
        one.reads_results_late = late
    return found


def test_the_step_that_rank_0_begins_next_is_the_last(board):
    first, second = ranks(board)
    first.before_step(4)
    assert not first.should_stop_after(4)
    board.set(STOP_KEY, "SIGTERM")
    assert not second.should_stop_after(4)  # rank 0 has not decided yet
    second.before_step(5)  # only rank 0 decides
    assert not second.should_stop_after(5)
    first.before_step(5)
    # The other rank may be a step behind, and reads the same number.
    assert [second.should_stop_after(4), second.should_stop_after(5), first.should_stop_after(5)] == [False, True, True]


def test_the_following_step_is_the_last_where_results_are_read_late(board):
    first, second = ranks(board, late=True)
    board.set(STOP_KEY, "SIGTERM")
    first.before_step(5)
    assert [rank.should_stop_after(5) for rank in (first, second)] == [False, False]
    assert [rank.should_stop_after(6) for rank in (first, second)] == [True, True]


def test_the_launchers_stop_request_is_seen(board, tmp_path):
    request_stop(tmp_path)
    (one,) = ranks(board, 1)
    one.before_step(1)
    assert one.should_stop_after(1)


def test_a_single_process_stops_and_restores_the_signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    with GracefulStop(None, rank=0, world_size=1) as stopping:
        stopping.before_step(1)
        assert not stopping.should_stop_after(1)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 300
        while not stopping.should_stop_after(2) and time.monotonic() < deadline:
            stopping.before_step(2)
        assert stopping.should_stop_after(2)
    assert signal.getsignal(signal.SIGTERM) is before


ENDS = """
import ctypes, os, signal, sys, time
from pathlib import Path
from echelon.faults.state_store import FileStateStore
from echelon.faults.graceful_stop import GracefulStop
with GracefulStop(FileStateStore(Path(sys.argv[1])), rank=0, world_size=2):
    for _ in range(int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(float(sys.argv[3]))
    print("still here", flush=True)
    ctypes.CDLL(None).sleep(600)  # in C, like a main thread that hangs in a collective
"""


def sent(folder, times, seconds):
    """(what it printed if it was alive after `seconds`, exit code)."""
    words = [str(folder), str(times), str(seconds)]
    with subprocess.Popen([sys.executable, "-c", ENDS, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        if said:
            process.send_signal(signal.SIGTERM)
        return said, process.wait(ALWAYS)  # long before it would end by itself


def test_a_second_sigterm_ends_a_hanging_process(board):
    assert sent(board.folder, 1, 0.3) == (b"still here\n", 143)


def test_a_rank_exits_if_a_peer_reported_a_failure(board):
    board.put(RankState(rank=1, host=os.uname().nodename, pid=os.getpid(), exit_kind="raised"))
    assert sent(board.folder, 1, 60) == (b"", 143)


def test_a_rank_exits_if_a_peer_is_gone(board):
    with subprocess.Popen(["true"]) as peer:
        while process_is_alive(peer.pid):  # it stays a zombie until its status is read
            time.sleep(0.01)
        board.put(RankState(rank=1, host=os.uname().nodename, pid=peer.pid))
        assert sent(board.folder, 1, 60) == (b"", 143)
