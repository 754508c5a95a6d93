"""The thread beside a rank's work: it leaves heartbeats, and looks whether the rank waits for too long.

torch ends a collective that takes longer than the time-out: gloo with an exception, NCCL with the process. Shortly
before that the first rank that notices says who is to blame, while all of them can still be asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from echelon.faults.diagnose import Verdict, diagnose
from echelon.faults.failure_report import paragraph
from echelon.faults.flight_recorder import Recorder
from echelon.faults.rank_state import State, look
from echelon.faults.state_store import Board

TICK = 0.2
"""seconds between two looks at this rank's own ring"""
DIAGNOSIS, CULPRIT = "diagnosis", "culprit"

Tell = Callable[[Verdict, str], None]


def beat_of(timeout: float) -> float:
    """Seconds between heartbeats: ten to a time-out, and neither a burden nor stale."""
    return min(max(timeout / 10, TICK), 5.0)


def early_of(timeout: float) -> float:
    """Seconds of waiting after which the rank asks why: a little before torch ends it."""
    return timeout - min(max(0.2 * timeout, 0.2), 5.0)


class Heart:
    def __init__(self, recorder: Recorder, board: Board, *, rank: int, world: int, timeout: float, tell: Tell):
        self.recorder, self.board, self.rank, self.world = recorder, board, rank, world
        self.timeout, self.beat = timeout, beat_of(timeout)
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-heart", daemon=True)
        self._asked = False

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def publish(self, state: State | None = None) -> None:
        self.board.put(state or look(self.recorder, self.rank))

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(TICK):
            try:
                self.recorder.poll()
                if time.monotonic() - last >= self.beat:
                    last = time.monotonic()
                    self.publish()
                self._look_at_own()
            except Exception:  # the store or the folder is gone: the run is over, or ending
                if self._over.wait(self.beat):
                    return

    def _look_at_own(self) -> None:
        if self.recorder.longest_wait() < early_of(self.timeout) or self._asked:
            return
        self._asked = True
        self.publish()
        self.diagnose()

    def diagnose(self, own: State | None = None) -> str:
        """Says who is to blame, if nobody did yet; the paragraph of who did."""
        if not self.board.claim():
            return self.board.get(DIAGNOSIS)
        states = self.board.states(self.world)
        if own is not None:
            states[self.rank] = own
        verdict = diagnose(states)
        text = paragraph(verdict, states, beat=self.beat)
        self.board.set(CULPRIT, ",".join(map(str, verdict.culprits)))
        self.board.set(DIAGNOSIS, text)
        self._tell(verdict, text)
        return text
