"""The heartbeat thread of a rank: it publishes the rank's state and detects that the rank waits too long.

torch ends a collective that exceeds the timeout: gloo raises an exception, NCCL aborts the process. Shortly before
that, the first rank that notices diagnoses the hang, while every rank still publishes its state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from echelon.faults.diagnose import Diagnosis, diagnose
from echelon.faults.failure_report import format_diagnosis
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.rank_state import RankState, capture_rank_state
from echelon.faults.state_store import StateStore

POLL_S = 0.2
"""seconds between two checks of this rank's flight recorder"""
DIAGNOSIS_KEY, CULPRIT_KEY = "diagnosis", "culprit"


def heartbeat_interval(timeout: float) -> float:
    """Seconds between heartbeats: a tenth of the timeout, at least `POLL_S` and at most 5."""
    return min(max(timeout / 10, POLL_S), 5.0)


def diagnosis_delay(timeout: float) -> float:
    """Seconds of waiting after which a rank diagnoses the hang: shortly before torch's timeout."""
    return timeout - min(max(0.2 * timeout, 0.2), 5.0)


class Heartbeat:
    """Publishes a rank's state in the background, and the diagnosis of a hang before torch's timeout."""

    def __init__(
        self,
        recorder: FlightRecorder,
        store: StateStore,
        *,
        rank: int,
        world_size: int,
        timeout: float,
        on_diagnosis: Callable[[Diagnosis, str], None],
    ):
        self.recorder, self.store, self.rank, self.world_size = recorder, store, rank, world_size
        self.timeout, self.interval = timeout, heartbeat_interval(timeout)
        self._on_diagnosis = on_diagnosis
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-heartbeat", daemon=True)
        self._has_diagnosed = False

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def publish(self, state: RankState | None = None) -> None:
        self.store.put(state or capture_rank_state(self.recorder, self.rank))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(POLL_S):
            try:
                self.recorder.poll_device_waits()
                if time.monotonic() - last >= self.interval:
                    last = time.monotonic()
                    self.publish()
                self._check_own_wait()
            except Exception:  # the store or the directory is gone: the run has ended, or is ending
                if self._stopped.wait(self.interval):
                    return

    def _check_own_wait(self) -> None:
        if self.recorder.longest_wait() < diagnosis_delay(self.timeout) or self._has_diagnosed:
            return
        self._has_diagnosed = True
        self.publish()
        self.diagnose()

    def diagnose(self, own_state: RankState | None = None) -> str:
        """Diagnose the failure unless another rank did; returns the report of the rank that did."""
        if not self.store.claim():
            return self.store.get(DIAGNOSIS_KEY)
        states = self.store.states(self.world_size)
        if own_state is not None:
            states[self.rank] = own_state
        diagnosis = diagnose(states)
        text = format_diagnosis(diagnosis, states, interval=self.interval)
        self.store.set(CULPRIT_KEY, ",".join(map(str, diagnosis.culprits)))
        self.store.set(DIAGNOSIS_KEY, text)
        self._on_diagnosis(diagnosis, text)
        return text
