"""The thread beside a rank's work: it leaves heartbeats, and looks whether the rank waits for too long.

torch ends a collective that takes longer than the time-out: gloo with an exception, NCCL with the process. Shortly
before that the first rank that notices says who is to blame, while all of them can still be asked.
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
"""seconds between two looks at this rank's own ring"""
DIAGNOSIS_KEY, CULPRIT_KEY = "diagnosis", "culprit"

OnDiagnosis = Callable[[Diagnosis, str], None]


def heartbeat_interval(timeout: float) -> float:
    """Seconds between heartbeats: ten to a time-out, and neither a burden nor stale."""
    return min(max(timeout / 10, POLL_S), 5.0)


def diagnosis_delay(timeout: float) -> float:
    """Seconds of waiting after which the rank asks why: a little before torch ends it."""
    return timeout - min(max(0.2 * timeout, 0.2), 5.0)


class Heartbeat:
    def __init__(
        self,
        recorder: FlightRecorder,
        board: StateStore,
        *,
        rank: int,
        world: int,
        timeout: float,
        on_diagnosis: OnDiagnosis,
    ):
        self.recorder, self.board, self.rank, self.world = recorder, board, rank, world
        self.timeout, self.interval = timeout, heartbeat_interval(timeout)
        self._on_diagnosis = on_diagnosis
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-heart", daemon=True)
        self._has_diagnosed = False

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def publish(self, state: RankState | None = None) -> None:
        self.board.put(state or capture_rank_state(self.recorder, self.rank))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(POLL_S):
            try:
                self.recorder.poll_device_waits()
                if time.monotonic() - last >= self.interval:
                    last = time.monotonic()
                    self.publish()
                self._check_own_wait()
            except Exception:  # the store or the folder is gone: the run is over, or ending
                if self._stopped.wait(self.interval):
                    return

    def _check_own_wait(self) -> None:
        if self.recorder.longest_wait() < diagnosis_delay(self.timeout) or self._has_diagnosed:
            return
        self._has_diagnosed = True
        self.publish()
        self.diagnose()

    def diagnose(self, own_state: RankState | None = None) -> str:
        """Says who is to blame, if nobody did yet; the paragraph of who did."""
        if not self.board.claim():
            return self.board.get(DIAGNOSIS_KEY)
        states = self.board.states(self.world)
        if own_state is not None:
            states[self.rank] = own_state
        verdict = diagnose(states)
        text = format_diagnosis(verdict, states, interval=self.interval)
        self.board.set(CULPRIT_KEY, ",".join(map(str, verdict.culprits)))
        self.board.set(DIAGNOSIS_KEY, text)
        self._on_diagnosis(verdict, text)
        return text
