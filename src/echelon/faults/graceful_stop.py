"""SIGTERM: the machine is wanted back. All ranks stop after the same step, and save.

[Note: one step for all, and no message more]

Any rank may be sent the signal, at any moment, and must not stop alone.

1. It leaves the word that a stop is wanted where all can see it: in the launcher's folder, or in the group's store.
2. The first rank looks for that word before each step. If it is there, it leaves the number of the step to stop after:
   the one it is about to begin, or the next one where steps are read one late. Then it begins the step.
3. Every rank looks for that number after each step. A step cannot end on any rank before the first rank began it:
   its gradients and its loss are everybody's. So the number was there before any rank looked, or is of a later step.

[Note: whose SIGTERM]

torch sends the same signal to ranks whose peer has failed. Those must end at once. A thread beside the work answers:
the system wakes it by a pipe also while the main thread hangs in a collective. If a rank of this machine is gone, or
one anywhere has said that it failed, this process ends; so it does at a second SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from echelon.faults.state_store import C10dStateStore, StateStore
from echelon.launch.scratch_dir import STOP_KEY

STOP_STEP_KEY = "stop at"
EXIT_STATUS = 128 + signal.SIGTERM
"""exit status of a process that stopped because it was asked to"""


class GracefulStop:
    """Around a run, on every rank."""

    def __init__(self, store: StateStore | None, *, rank: int, world_size: int, handles_signals: bool = True):
        """`board` is none for one process alone; where it does not listen, somebody else answers signals."""
        self._store, self._rank, self._world = store, rank, world_size
        self._handles_signals = handles_signals and threading.current_thread() is threading.main_thread()
        self._requested = threading.Event()
        self._count = 0
        self._stop_step: int | None = None
        self.reads_results_late = False
        """results are read one step late, and only then is it sure that the first rank began a step"""

    def __enter__(self) -> Self:
        if self._handles_signals:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._before = signal.signal(signal.SIGTERM, _leave_to_thread)
            self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._handle_signals, name="echelon-sigterm", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles_signals:
            signal.set_wakeup_fd(self._pipe_before)
            signal.signal(signal.SIGTERM, self._before)
            os.close(self._write)  # the thread reads the end
            self._thread.join(timeout=2.0)

    # -- what the loop asks, see the first note -----------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """A step is about to begin."""
        if self._rank or self._stop_step is not None or not self._is_requested():
            return
        self._stop_step = step + self.reads_results_late
        if self._store is not None:
            self._store.set(STOP_STEP_KEY, str(self._stop_step))
            self._store.get(STOP_STEP_KEY)  # what a store has answered to, it has

    def should_stop_after(self, step: int) -> bool:
        """A step has ended: whether it was the last one."""
        if self._stop_step is None and self._store is not None:
            with suppress(RuntimeError, OSError):  # a store that is gone: what there is to say of that, others say
                text = self._store.get(STOP_STEP_KEY)
                self._stop_step = int(text) if text else None
        return self._stop_step is not None and step >= self._stop_step

    def _is_requested(self) -> bool:
        if self._requested.is_set() or self._store is None:
            return self._requested.is_set()
        with suppress(RuntimeError, OSError):
            return bool(self._store.get(STOP_KEY))
        return False

    # -- the thread beside the work, see the second note --------------------------------------------------------------

    def _handle_signals(self) -> None:
        while data := os.read(self._read, 1):
            if data[0] != signal.SIGTERM:
                continue
            self._count += 1
            if self._count > 1 or self._peer_is_gone():
                os._exit(EXIT_STATUS)
            self._requested.set()
            if self._store is not None:
                with suppress(RuntimeError, OSError):
                    self._store.set(STOP_KEY, "SIGTERM")
        os.close(self._read)

    def _peer_is_gone(self) -> bool:
        if self._store is None:
            return False
        with suppress(RuntimeError, OSError):
            here = socket.gethostname()
            states = [state for state in self._store.states(self._world) if state.rank != self._rank]
            return any(
                state.exit_kind or (state.pid and state.host == here and not process_is_alive(state.pid))
                for state in states
            )
        return isinstance(self._store, C10dStateStore)  # a store that is gone took the run with it


def process_is_alive(pid: int) -> bool:
    """Not a process that ended and that nobody has asked for its exit status either."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    except OSError:  # somebody else's
        return True


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """The thread answers."""
