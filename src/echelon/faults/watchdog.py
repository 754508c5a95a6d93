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
from echelon.faults.diagnose import Verdict
from echelon.faults.event_log import INJECTED, write
from echelon.faults.failure_report import STALE, facts
from echelon.faults.flight_recorder import here
from echelon.faults.heartbeat import DIAGNOSIS, Heart
from echelon.faults.rank_state import look
from echelon.faults.state_store import Board, Files, InStore
from echelon.launch import scratch_dir
from echelon.launch.rank_failure import lost_peer
from echelon.launch.world import World, under_launcher

RUN = "run"
"""the name under which rank 0 leaves the run's directory"""
LINGER = 1.0
"""seconds that a rank which failed stays, until somebody is seen to wait for it"""


@contextmanager
def watched(world: World, timeout: float) -> Iterator[Watch]:
    """Around a run of all ranks. Ranks of a group that somebody else made are recorded and not watched."""
    here.reset()
    board = _board(world)
    if board is None:
        yield Watch(None)
        return
    if isinstance(board, Files):
        here.keep_in(board.ring(world.rank))
    watch = Watch(board)
    heart = Heart(here, board, rank=world.rank, world=world.world_size, timeout=timeout, tell=watch.tell)
    watch.publish = heart.publish
    heart.start()
    try:
        yield watch
    except Exception as error:
        with suppress(Exception):  # what is said of a failure must not hide it
            _failed(heart, board, error)
        if isinstance(board, InStore) and lost_peer(error) and board.get(DIAGNOSIS):
            raise SystemExit(1) from None  # another rank has told why, with the traceback that matters
        raise
    finally:
        heart.stop()


class Watch:
    def __init__(self, board: Board | None):
        self._board = self.board = board
        self.listens = board is not None or not under_launcher()
        """signals that this process is sent are for the run: nobody else made its group"""
        self._run = ""
        self.publish: Callable[[], None] = lambda: None
        """leaves a heartbeat now"""

    def stands(self, position: str) -> None:
        """This rank's place in the mesh; all may ask for it from now on, also where no heartbeat ever follows."""
        here.position = position
        self.publish()

    def keeps(self, run: Path) -> None:
        """Rank 0 tells where the run's log is."""
        self._run = str(run.absolute())
        if self._board is not None:
            self._board.set(RUN, self._run)

    def injected(self, fault: str, step: int) -> None:
        """A fault on purpose strikes: whoever reads the log later must know that it was one."""
        run = self._run or (self._board.get(RUN) if self._board is not None else "")
        if run:
            write(Path(run), {"fault": fault, "step": step}, INJECTED)

    def tell(self, verdict: Verdict, text: str) -> None:
        """To the run's log, and to people where no launcher of ours does it."""
        assert self._board is not None
        if isinstance(self._board, InStore):
            print(f"\nechelon: {text}\n", file=sys.stderr, flush=True)
        if run := self._board.get(RUN):
            write(Path(run), facts(verdict, text))


def _board(world: World) -> Board | None:
    folder = scratch_dir.folder()
    if not under_launcher() or (world.world_size == 1 and folder is None):
        return None
    if folder is not None:
        return Files(folder / scratch_dir.FAULTS)
    return InStore(compat.own_store())


def _failed(heart: Heart, board: Board, error: Exception) -> None:
    lost = lost_peer(error)
    if isinstance(board, InStore):
        # torchrun ends the ranks that are left a tenth of a second after one died: not before this one has spoken.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    reason = "".join(traceback.format_exception_only(error)).strip()
    own = look(here, heart.rank).after("raised", reason, lost_peer=lost)
    heart.publish(own)
    deadline = time.monotonic() + (0.05 if lost else max(LINGER, 1.5 * heart.beat if isinstance(board, InStore) else 0))
    while time.monotonic() < deadline:
        others = [state for state in board.states(heart.world) if state.rank != heart.rank]
        if all(state.how for state in others) or any(e.flag == "w" for s in others for e in s.entries):
            break
        time.sleep(0.05)
    if isinstance(board, InStore):
        heart.stop()
        heart.diagnose(own)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    elif lost:
        _end_stopped(heart, board)


def _end_stopped(heart: Heart, board: Board) -> None:
    """A process that is stopped does not answer the launcher, which would wait for half a minute: it is ended here."""
    for state in board.states(heart.world):
        is_silent = bool(state.when) and time.time() - state.when > max(STALE * heart.beat, 2.0)
        if state.rank != heart.rank and is_silent and not state.how:
            with suppress(OSError):
                os.kill(state.pid, signal.SIGKILL)
