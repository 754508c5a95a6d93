"""A pool of warm rank processes: start once, run many small distributed programs.

Starting ranks takes seconds, a process group on running ranks takes milliseconds. Tests and `verify` run hundreds of
programs on up to eight ranks; each gets a new process group on running ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.launch import forkserver
from echelon.launch.pool_worker import LEAVE, READY, PoolTask, TaskOutcome, serve_tasks
from echelon.launch.rank_failure import RankError, RankFailure, first_failure
from echelon.launch.scratch_dir import ScratchFolder
from echelon.launch.serialize import deserialize, serialize
from echelon.launch.world import LOOPBACK, refuse_bad_environment

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Seconds for ranks to start, including imports."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds for ranks to destroy their process group after a successful task."""
GRACE_S = 0.25
"""Seconds that the other ranks get to report after the first failure."""
GRACE_FOR_CAUSE_S = 10.0
"""The same after a lost peer, because the rank that caused the failure has not reported yet."""
EXIT_CODE_TIMEOUT_S = 30.0
"""Seconds for the fork server of a busy machine to report the exit code of a rank that has ended."""
STACK_TIMEOUT_S = 5.0
"""Seconds for ranks that hang to write their stacks; a stopped one never does."""
MAX_FRAMES = 6
"""Innermost stack lines reported of a rank that timed out."""


class RankPool:
    """Warm rank processes on this machine, one thread each, for programs of any world size.

    Ranks start when a program first needs them. After a failure the ranks of the program are ended, because their state
    is unknown, and new ones are forked for the next program. Not thread-safe.
    """

    def __init__(self, *, preload: Iterable[str] = (), device: str = "cpu") -> None:
        """`preload`: modules that every rank needs, imported once before the first rank starts.

        With device `cuda` every rank has a GPU of its own, and collectives on it use NCCL.
        """
        refuse_bad_environment()
        self._device = device
        self._context = forkserver.forkserver_context(preload)
        self._ranks: list[_PoolRank] = []
        self._num_tasks = 0
        self._folder: ScratchFolder | None = None
        self._store: TCPStore | None = None

    def run(
        self, function: Callable[..., T], world: int, /, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on ranks 0 to world - 1 of a gloo group; returns the results by rank.

        The function must be importable by name. `timeout` is in seconds, for the call and for each collective in it,
        without the start of ranks. Raises `RankError` with the first failure.
        """
        if world < 1:
            raise ValueError(f"at least one rank is required (world={world})")
        self._num_tasks += 1
        task = PoolTask(
            name=f"task{self._num_tasks}",
            rank=0,
            world=world,
            timeout=timeout,
            device=self._device,
            sys_path=[entry or os.getcwd() for entry in sys.path],
            call=serialize((function, args, kwargs)),
        )
        ranks = self._warm_ranks(world)
        try:
            deadline = time.monotonic() + timeout
            for number, rank in enumerate(ranks):
                rank.send(serialize(replace(task, rank=number)))
            values, failures = _collect(ranks, deadline)
            if failures or len(values) < world:
                name = f"{function.__module__}.{function.__qualname__}"
                raise _make_error(ranks, values, failures, name=name, timeout=timeout)
            for rank in ranks:
                rank.send(LEAVE)
            _await_ready(ranks, LEAVE_TIMEOUT_S)
        except BaseException:
            # Also on Ctrl-C: the state of the ranks is unknown.
            for rank in ranks:
                rank.end()
            raise
        return [deserialize(values[number]) for number in range(world)]

    def close(self) -> None:
        """End all ranks; the pool starts new ones if it is used again."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _warm_ranks(self, world: int) -> list[_PoolRank]:
        if self._store is None:
            self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        if self._folder is None:
            self._folder = ScratchFolder("pool")
        for rank in [rank for rank in self._ranks if not rank.alive]:
            rank.end()
            self._ranks.remove(rank)
        num_warm = len(self._ranks)
        while len(self._ranks) < world:
            self._ranks.append(_PoolRank(self._context, self._store.port, self._folder.path))
        _await_ready(self._ranks[num_warm:], START_TIMEOUT_S)
        return self._ranks[:world]


class _PoolRank:
    """The pool's handle of one rank process."""

    def __init__(self, context: ForkServerContext, port: int, folder: Path) -> None:
        handle, path = tempfile.mkstemp(prefix="stack-", dir=folder)
        os.close(handle)
        self._stack = Path(path)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        # A daemon ends with this process, even if the pool is not closed.
        self.process: BaseProcess = context.Process(target=serve_tasks, args=(theirs, port, path), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return not self.connection.closed and self.process.is_alive()

    def send(self, message: bytes) -> None:
        # If the rank died, reading its answer fails and reports the exit code.
        with suppress(ConnectionError):
            self.connection.send_bytes(message)

    def end(self) -> None:
        if not self.connection.closed:
            self.process.kill()
            self.process.join()
            self.process.close()
            self.connection.close()
            self._stack.unlink(missing_ok=True)

    def exitcode(self) -> int | None:
        """The exit code of a process that has closed its connection."""
        self.process.join(timeout=EXIT_CODE_TIMEOUT_S)
        return self.process.exitcode

    def request_stack(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """The stack that the rank's fault handler wrote."""
        return self._stack.read_text().rstrip()


def _await_ready(ranks: Sequence[_PoolRank], limit: float) -> None:
    deadline = time.monotonic() + limit
    for number, rank in enumerate(ranks):
        if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RankError(f"a rank was not ready after {limit:g} s", rank=number, reason="not ready")
        try:
            message = rank.connection.recv_bytes()
        except (EOFError, ConnectionError):
            reason = RankFailure.from_exit_code(rank.exitcode(), number).reason
            hint = 'a script that starts ranks must do so under if __name__ == "__main__":'
            error = f"a rank died between two tasks ({reason}); {hint}"
            raise RankError(error, rank=number, reason=reason) from None
        if message != READY:
            raise AssertionError(f"expected {READY!r} from a rank, got {message[:20]!r}")


def _collect(ranks: Sequence[_PoolRank], deadline: float) -> tuple[dict[int, bytes], list[RankFailure]]:
    """Wait for every rank's outcome, until the deadline or until the grace period after a failure ends."""
    values: dict[int, bytes] = {}
    failures: list[RankFailure] = []
    pending = {rank.connection: number for number, rank in enumerate(ranks)}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            number = pending.pop(connection)
            try:
                outcome: TaskOutcome = deserialize(connection.recv_bytes())
            except (EOFError, ConnectionError):
                outcome = RankFailure.from_exit_code(ranks[number].exitcode(), number, ranks[number].stack())
            if isinstance(outcome, RankFailure):
                failures.append(outcome)
            else:
                values[number] = outcome
        if failures:
            grace = GRACE_FOR_CAUSE_S if first_failure(failures).lost_peer else GRACE_S
            since = min(failure.time_ns for failure in failures) / 1e9
            deadline = min(deadline, since + grace)
    return values, failures


def _make_error(
    ranks: Sequence[_PoolRank], values: dict[int, bytes], failures: list[RankFailure], *, name: str, timeout: float
) -> RankError:
    world = len(ranks)
    failed = {failure.rank for failure in failures}
    unfinished = [number for number in range(world) if number not in values and number not in failed]
    cause = first_failure(failures) if failures else None
    if cause is not None and not (cause.lost_peer and unfinished):
        return RankError.from_failure(cause, world_size=world, function=name)
    # Every failure is a lost peer or a timeout: some rank hangs.
    numbers = ", ".join(map(str, unfinished))
    where = _read_stacks({number: ranks[number] for number in unfinished})
    if cause is not None:
        remark = f"ranks that had not finished: {numbers}\n{where}"
        return RankError.from_failure(cause, world_size=world, function=name, remark=remark)
    reason = f"ranks that had not finished after {timeout:g} s: {numbers}"
    return RankError(f"{name} timed out on {world} ranks ({reason})\n{where}", rank=unfinished[0], reason=reason)


def _read_stacks(ranks: dict[int, _PoolRank]) -> str:
    """The current stack of each rank, innermost call first."""
    for rank in ranks.values():
        rank.request_stack()
    deadline = time.monotonic() + STACK_TIMEOUT_S
    while time.monotonic() < deadline and not all(rank.stack() for rank in ranks.values()):
        time.sleep(0.01)
    parts = []
    for number, rank in ranks.items():
        frames = [line for line in rank.stack().splitlines() if line.startswith("  File")]
        parts.append("\n".join([f"rank {number} was in (most recent call first):", *frames[:MAX_FRAMES]]))
    return "\n".join(parts)
