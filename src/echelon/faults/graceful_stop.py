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

from echelon.faults.state_store import Board, InStore
from echelon.launch.scratch_dir import STOP

AT = "stop at"
EXIT = 128 + signal.SIGTERM
"""exit status of a process that stopped because it was asked to"""


class Stopping:
    """Around a run, on every rank."""

    def __init__(self, board: Board | None, *, rank: int, world: int, listens: bool = True):
        """`board` is none for one process alone; where it does not listen, somebody else answers signals."""
        self._board, self._rank, self._world = board, rank, world
        self._listens = listens and threading.current_thread() is threading.main_thread()
        self._asked = threading.Event()
        self._count = 0
        self._at: int | None = None
        self.late = False
        """results are read one step late, and only then is it sure that the first rank began a step"""

    def __enter__(self) -> Self:
        if self._listens:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._before = signal.signal(signal.SIGTERM, _handled)
            self._pipe_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._answer, name="echelon-sigterm", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.set_wakeup_fd(self._pipe_before)
            signal.signal(signal.SIGTERM, self._before)
            os.close(self._write)  # the thread reads the end
            self._thread.join(timeout=2.0)

    # -- what the loop asks, see the first note -----------------------------------------------------------------------

    def before(self, step: int) -> None:
        """A step is about to begin."""
        if self._rank or self._at is not None or not self._is_wanted():
            return
        self._at = step + self.late
        if self._board is not None:
            self._board.set(AT, str(self._at))
            self._board.get(AT)  # what a store has answered to, it has

    def is_due(self, step: int) -> bool:
        """A step has ended: whether it was the last one."""
        if self._at is None and self._board is not None:
            with suppress(RuntimeError, OSError):  # a store that is gone: what there is to say of that, others say
                text = self._board.get(AT)
                self._at = int(text) if text else None
        return self._at is not None and step >= self._at

    def _is_wanted(self) -> bool:
        if self._asked.is_set() or self._board is None:
            return self._asked.is_set()
        with suppress(RuntimeError, OSError):
            return bool(self._board.get(STOP))
        return False

    # -- the thread beside the work, see the second note --------------------------------------------------------------

    def _answer(self) -> None:
        while data := os.read(self._read, 1):
            if data[0] != signal.SIGTERM:
                continue
            self._count += 1
            if self._count > 1 or self._peer_is_gone():
                os._exit(EXIT)
            self._asked.set()
            if self._board is not None:
                with suppress(RuntimeError, OSError):
                    self._board.set(STOP, "SIGTERM")
        os.close(self._read)

    def _peer_is_gone(self) -> bool:
        if self._board is None:
            return False
        with suppress(RuntimeError, OSError):
            here = socket.gethostname()
            states = [state for state in self._board.states(self._world) if state.rank != self._rank]
            return any(state.how or (state.pid and state.host == here and not is_alive(state.pid)) for state in states)
        return isinstance(self._board, InStore)  # a store that is gone took the run with it


def is_alive(pid: int) -> bool:
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


def _handled(number: int, frame: FrameType | None) -> None:
    """The thread answers."""
