"""Graceful stop: after a SIGTERM all ranks stop after the same step, and save.

[Note: agree on the last step without a collective]

Any rank may receive the signal at any moment, and must not stop alone.

1. It publishes the request to stop in the state store: the launcher's scratch directory, or the process group's store.
2. Rank 0 reads the request before each step. If there is one, it publishes the number of the last step: the one it is
   about to begin, or the next one where results are read one step late. Then it begins the step.
3. Every rank reads that number after each step. No rank can finish a step before rank 0 began it, because its
   gradients and its loss are reduced over all ranks. So the number was there before any rank read it, or names a later
   step.

[Note: two meanings of SIGTERM]

torch sends the same signal to ranks whose peer has failed, and those must exit at once. A background thread handles
the signal: Python's wakeup pipe reaches it even while the main thread hangs in a collective. If a rank of this node is
gone, or any rank has published that it failed, this process exits; it also does on a second SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self

from echelon.faults.state_store import C10dStateStore, StateStore
from echelon.launch.scratch_dir import STOP_KEY

STOP_STEP_KEY = "stop at"
EXIT_STATUS = 128 + signal.SIGTERM
"""exit status of a process that stopped gracefully"""


class GracefulStop:
    """Handles SIGTERM during a run, on every rank."""

    def __init__(self, store: StateStore | None, *, rank: int, world_size: int, handles_signals: bool = True):
        """`store` is None for a single process. Without `handles_signals`, other code handles them."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._handles_signals = handles_signals and threading.current_thread() is threading.main_thread()
        self._requested = threading.Event()
        self._count = 0
        self._stop_step: int | None = None
        self.reads_results_late = False
        """whether the loop reads results one step late: only then has rank 0 certainly begun the step"""

    def __enter__(self) -> Self:
        if self._handles_signals:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._before = signal.signal(signal.SIGTERM, _leave_to_thread)
            self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._handle_signals, name="echelon-sigterm", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._handles_signals:
            signal.set_wakeup_fd(self._pipe_before)
            signal.signal(signal.SIGTERM, self._before)
            os.close(self._write)  # ends the thread's read
            self._thread.join(timeout=2.0)

    # -- called by the loop, see the first note -----------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """Publish the last step if a stop was requested, on rank 0."""
        if self._rank or self._stop_step is not None or not self._is_requested():
            return
        self._stop_step = step + self.reads_results_late
        if self._store is not None:
            self._store.set(STOP_STEP_KEY, str(self._stop_step))
            self._store.get(STOP_STEP_KEY)  # the store answers after it has applied the set

    def should_stop_after(self, step: int) -> bool:
        """Whether the step that has just ended is the last one."""
        if self._stop_step is None and self._store is not None:
            with suppress(RuntimeError, OSError):  # the store is gone: the next collective reports that
                text = self._store.get(STOP_STEP_KEY)
                self._stop_step = int(text) if text else None
        return self._stop_step is not None and step >= self._stop_step

    def _is_requested(self) -> bool:
        if self._requested.is_set() or self._store is None:
            return self._requested.is_set()
        with suppress(RuntimeError, OSError):
            return bool(self._store.get(STOP_KEY))
        return False

    # -- the signal thread, see the second note -----------------------------------------------------------------------

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
            host = socket.gethostname()
            return any(
                peer.exit_kind or (peer.pid and peer.host == host and not process_is_alive(peer.pid))
                for peer in self._store.states(self._world_size)
                if peer.rank != self._rank
            )
        return isinstance(self._store, C10dStateStore)  # the run has ended with its store


def process_is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    except OSError:  # another user's process
        return True


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: `_handle_signals` reads the signal from the wakeup pipe."""
