"""Diagnosis around a run: heartbeats while it lasts, and a word when a rank fails."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon import compat
from echelon.faults.diagnose import Diagnosis
from echelon.faults.event_log import INJECTED_EVENT, append_event
from echelon.faults.failure_report import MAX_MISSED_HEARTBEATS, diagnosis_record
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.heartbeat import DIAGNOSIS_KEY, Heartbeat
from echelon.faults.rank_state import capture_rank_state
from echelon.faults.state_store import C10dStateStore, FileStateStore, StateStore
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import is_lost_peer
from echelon.launch.world import World, under_launcher

RUN_KEY = "run"
"""the name under which rank 0 leaves the run's directory"""
LINGER_S = 1.0
"""seconds that a rank which failed stays, until somebody is seen to wait for it"""


@contextmanager
def watch_run(world: World, timeout: float, recorder: FlightRecorder) -> Iterator[Watchdog]:
    """Around a run of all ranks. Ranks of a group that somebody else made are recorded and not watched."""
    board = _open_store(world)
    if board is None:
        yield Watchdog(None, recorder)
        return
    if isinstance(board, FileStateStore):
        recorder.map_to_file(board.recorder_path(world.rank))
    watch = Watchdog(board, recorder)
    heart = Heartbeat(
        recorder, board, rank=world.rank, world=world.world_size, timeout=timeout, on_diagnosis=watch.report
    )
    watch.publish = heart.publish
    heart.start()
    try:
        yield watch
    except Exception as error:
        with suppress(Exception):  # what is said of a failure must not hide it
            _report_failure(heart, board, error)
        if isinstance(board, C10dStateStore) and is_lost_peer(error) and board.get(DIAGNOSIS_KEY):
            raise SystemExit(1) from None  # another rank has told why, with the traceback that matters
        raise
    finally:
        heart.stop()


class Watchdog:
    def __init__(self, store: StateStore | None, recorder: FlightRecorder):
        self._board = self.store = store
        self._recorder = recorder
        self.handles_signals = store is not None or not under_launcher()
        """signals that this process is sent are for the run: nobody else made its group"""
        self._run = ""
        self.publish: Callable[[], None] = lambda: None
        """leaves a heartbeat now"""

    def set_mesh_position(self, position: str) -> None:
        """This rank's place in the mesh; all may ask for it from now on, also where no heartbeat ever follows."""
        self._recorder.mesh_position = position
        self.publish()

    def set_run_dir(self, run: Path) -> None:
        """Rank 0 tells where the run's log is."""
        self._run = str(run.absolute())
        if self._board is not None:
            self._board.set(RUN_KEY, self._run)

    def record_injection(self, fault: str, step: int) -> None:
        """A fault on purpose strikes: whoever reads the log later must know that it was one."""
        run = self._run or (self._board.get(RUN_KEY) if self._board is not None else "")
        if run:
            append_event(Path(run), {"fault": fault, "step": step}, INJECTED_EVENT)

    def report(self, verdict: Diagnosis, text: str) -> None:
        """To the run's log, and to people where no launcher of ours does it."""
        assert self._board is not None
        if isinstance(self._board, C10dStateStore):
            print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
        if run := self._board.get(RUN_KEY):
            append_event(Path(run), diagnosis_record(verdict, text))


def _open_store(world: World) -> StateStore | None:
    folder = scratch_dir.scratch_dir()
    if not under_launcher() or (world.world_size == 1 and folder is None):
        return None
    if folder is not None:
        return FileStateStore(folder / scratch_dir.FAULTS_DIR)
    return C10dStateStore(compat.dedicated_store())


def _report_failure(heart: Heartbeat, board: StateStore, error: Exception) -> None:
    lost = is_lost_peer(error)
    if isinstance(board, C10dStateStore):
        # torchrun ends the ranks that are left a tenth of a second after one died: not before this one has spoken.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reason = "".join(traceback.format_exception_only(error)).strip()
    own = capture_rank_state(heart.recorder, heart.rank).with_exit("raised", reason, lost_peer=lost)
    heart.publish(own)
    deadline = time.monotonic() + (
        0.05 if lost else max(LINGER_S, 1.5 * heart.interval if isinstance(board, C10dStateStore) else 0)
    )
    while time.monotonic() < deadline:
        others = [state for state in board.states(heart.world) if state.rank != heart.rank]
        if all(state.exit_kind for state in others) or any(e.flag == "w" for s in others for e in s.entries):
            break
        time.sleep(0.05)
    if isinstance(board, C10dStateStore):
        heart.stop()
        heart.diagnose(own)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    elif lost:
        _kill_stopped_ranks(heart, board)


def _kill_stopped_ranks(heart: Heartbeat, board: StateStore) -> None:
    """A process that is stopped does not answer the launcher, which would wait for half a minute: it is ended here."""
    for state in board.states(heart.world):
        is_silent = bool(state.heartbeat_time) and time.time() - state.heartbeat_time > max(
            MAX_MISSED_HEARTBEATS * heart.interval, 2.0
        )
        if state.rank != heart.rank and is_silent and not state.exit_kind:
            with suppress(OSError):
                os.kill(state.pid, signal.SIGKILL)
