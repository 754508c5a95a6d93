"""The watchdog of a run: it publishes heartbeats, and reports the cause when a rank fails."""

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
from echelon.faults.failure_report import INJECTED_EVENT, MAX_MISSED_HEARTBEATS, append_event, diagnosis_record
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.heartbeat import DIAGNOSIS_KEY, Heartbeat
from echelon.faults.rank_state import capture_rank_state
from echelon.faults.state_store import C10dStateStore, FileStateStore, StateStore
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import is_lost_peer
from echelon.launch.world import World, under_launcher

RUN_KEY = "run"
"""the key under which rank 0 publishes the run's directory"""
LINGER_S = 1.0
"""seconds for which a failed rank stays alive until another rank is seen to wait for it"""


@contextmanager
def watch_run(world: World, timeout: float, recorder: FlightRecorder) -> Iterator[Watchdog]:
    """Watch a run on this rank. Inside a process group that other code created, nothing is published."""
    store = _open_store(world)
    if store is None:
        yield Watchdog(None, recorder)
        return
    if isinstance(store, FileStateStore):
        recorder.map_to_file(store.recorder_path(world.rank))
    watchdog = Watchdog(store, recorder)
    rank, size = world.rank, world.world_size
    heartbeat = Heartbeat(recorder, store, rank=rank, world_size=size, timeout=timeout, on_diagnosis=watchdog.report)
    watchdog.publish = heartbeat.publish
    heartbeat.start()
    try:
        yield watchdog
    except Exception as error:
        with suppress(Exception):  # an error in the report must not hide the failure
            _report_failure(heartbeat, store, error)
        if isinstance(store, C10dStateStore) and is_lost_peer(error) and store.get(DIAGNOSIS_KEY):
            raise SystemExit(1) from None  # another rank has reported the cause, with the traceback that matters
        raise
    finally:
        heartbeat.stop()


class Watchdog:
    """One rank's access to the state store of a run."""

    def __init__(self, store: StateStore | None, recorder: FlightRecorder):
        self.store = store
        self._recorder = recorder
        self.handles_signals = store is not None or not under_launcher()
        """whether signals to this process are for the run: false in a process group that other code created"""
        self._run = ""
        self.publish: Callable[[], None] = lambda: None
        """publishes a heartbeat now"""

    def set_mesh_position(self, position: str) -> None:
        """Publish this rank's position on the mesh, also for a rank that fails before its next heartbeat."""
        self._recorder.mesh_position = position
        self.publish()

    def set_run_dir(self, run: Path) -> None:
        """Publish the run's directory, on rank 0."""
        self._run = str(run.absolute())
        if self.store is not None:
            self.store.set(RUN_KEY, self._run)

    def record_injection(self, fault: str, step: int) -> None:
        """Log an injected fault just before it strikes."""
        run = self._run or (self.store.get(RUN_KEY) if self.store is not None else "")
        if run:
            append_event(Path(run), {"fault": fault, "step": step}, INJECTED_EVENT)

    def report(self, diagnosis: Diagnosis, text: str) -> None:
        """Log a diagnosis, and print it where no launcher of ours does."""
        assert self.store is not None
        if isinstance(self.store, C10dStateStore):
            print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
        if run := self.store.get(RUN_KEY):
            append_event(Path(run), diagnosis_record(diagnosis, text))


def _open_store(world: World) -> StateStore | None:
    folder = scratch_dir.scratch_dir()
    if not under_launcher() or (world.world_size == 1 and folder is None):
        return None
    if folder is not None:
        return FileStateStore(folder / scratch_dir.FAULTS_DIR)
    return C10dStateStore(compat.dedicated_store())


def _report_failure(heartbeat: Heartbeat, store: StateStore, error: Exception) -> None:
    lost, under_torchrun = is_lost_peer(error), isinstance(store, C10dStateStore)
    if under_torchrun:
        # torchrun sends SIGTERM to the other ranks a tenth of a second after one died: block it until the report.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reason = "".join(traceback.format_exception_only(error)).strip()
    own_state = capture_rank_state(heartbeat.recorder, heartbeat.rank).with_exit("raised", reason, lost_peer=lost)
    heartbeat.publish(own_state)
    linger = max(LINGER_S, 1.5 * heartbeat.interval if under_torchrun else 0)
    deadline = time.monotonic() + (0.05 if lost else linger)
    while time.monotonic() < deadline:
        others = [state for state in store.states(heartbeat.world_size) if state.rank != heartbeat.rank]
        if all(state.exit_kind for state in others) or any(e.flag == "w" for s in others for e in s.entries):
            break
        time.sleep(0.05)
    if under_torchrun:
        heartbeat.stop()
        heartbeat.diagnose(own_state)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    elif lost:
        _kill_stopped_ranks(heartbeat, store)


def _kill_stopped_ranks(heartbeat: Heartbeat, store: StateStore) -> None:
    """Kill stopped processes, because the launcher would wait half a minute for them."""
    patience = max(MAX_MISSED_HEARTBEATS * heartbeat.interval, 2.0)
    for state in store.states(heartbeat.world_size):
        is_silent = bool(state.heartbeat_time) and time.time() - state.heartbeat_time > patience
        if state.rank != heartbeat.rank and is_silent and not state.exit_kind:
            with suppress(OSError):
                os.kill(state.pid, signal.SIGKILL)
