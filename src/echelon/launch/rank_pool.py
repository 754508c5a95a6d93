"""A pool of warm rank processes: start once, run many small distributed programs.

Starting ranks costs seconds, a process group on running ranks costs milliseconds. Tests and `verify` run hundreds of
programs on up to eight ranks; each gets a fresh process group on ranks that are already there.
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
from types import TracebackType
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.launch import forkserver
from echelon.launch.loopback import ADDRESS
from echelon.launch.pool_worker import LEAVE, READY, PoolTask, TaskOutcome, serve_tasks
from echelon.launch.rank_failure import RankError, RankFailure, first_failure
from echelon.launch.serialize import deserialize, serialize

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""Seconds for ranks to start, imports included."""
LEAVE_TIMEOUT_S = 10.0
"""Seconds for ranks to destroy their group after a good case."""
GRACE_S = 0.25
"""Seconds that the other ranks get to report after the first failure."""
GRACE_FOR_CAUSE_S = 2.0
"""The same where the failure reads like a consequence: the rank that caused it has not been heard of yet."""
MAX_FRAMES = 6
"""Innermost stack lines shown of a rank that did not finish."""


class RankPool:
    """Warm rank processes on this machine, one thread each, for programs of any world size.

    Ranks start when a program first needs them. A program that fails costs its ranks: they are ended, because nobody
    knows what it left behind, and forked anew for the next program. Not for use by several threads at once.
    """

    def __init__(self, *, preload: Iterable[str] = ()) -> None:
        """`preload`: modules that every rank will need, imported once before the first rank starts."""
        self._context = forkserver.forkserver_context(preload)
        self._ranks: list[_PoolRank] = []
        self._cases = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: TCPStore | None = None

    def run(
        self, function: Callable[..., T], world: int, /, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on ranks 0 to world - 1 of a gloo process group; the results by rank.

        The function must be importable by name: defined at the top level of a module. `timeout` is in seconds, for
        the whole call and for each collective in it; starting ranks is not counted. Raises `RankError` with the first
        failure.
        """
        if world < 1:
            raise ValueError(f"a program needs one rank or more (world={world})")
        self._cases += 1
        name = f"{function.__module__}.{function.__qualname__}"
        call = serialize((function, args, kwargs))
        path = [entry or os.getcwd() for entry in sys.path]
        ranks = self._warm_ranks(world)
        try:
            deadline = time.monotonic() + timeout
            case = PoolTask(name=f"case{self._cases}", rank=0, world=world, timeout=timeout, sys_path=path, call=call)
            for number, rank in enumerate(ranks):
                rank.send(serialize(replace(case, rank=number)))
            values, failures = _collect(ranks, deadline)
            if failures or len(values) < world:
                raise _make_error(ranks, values, failures, name=name, timeout=timeout)
            for rank in ranks:
                rank.send(LEAVE)
            _await_ready(ranks, LEAVE_TIMEOUT_S)
        except BaseException:
            # Also on Ctrl-C. What the ranks are in the middle of is unknown.
            for rank in ranks:
                rank.end()
            raise
        return [deserialize(values[number]) for number in range(world)]

    def close(self) -> None:
        """End all ranks. A closed pool starts new ones if it is used again."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _warm_ranks(self, world: int) -> list[_PoolRank]:
        if self._store is None:
            self._store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="echelon-pool-")
        for rank in [rank for rank in self._ranks if not rank.alive]:
            rank.end()
            self._ranks.remove(rank)
        started = []
        while len(self._ranks) < world:
            rank = _PoolRank(self._context, self._store.port, Path(self._folder.name))
            self._ranks.append(rank)
            started.append(rank)
        _await_ready(started, START_TIMEOUT_S)
        return self._ranks[:world]


class _PoolRank:
    """The parent's side of one rank process."""

    def __init__(self, context: ForkServerContext, port: int, folder: Path) -> None:
        handle, path = tempfile.mkstemp(prefix="stack-", dir=folder)
        os.close(handle)
        self._stack = Path(path)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        # A daemon: if nobody closes the pool, the end of this process does.
        self.process: BaseProcess = context.Process(target=serve_tasks, args=(theirs, port, path), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return not self.connection.closed and self.process.is_alive()

    def send(self, message: bytes) -> None:
        # If it died, whoever waits for its answer finds out, with the exit code.
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
        """How the process ended; it has hung up already."""
        self.process.join(timeout=2.0)
        return self.process.exitcode

    def request_stack(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """What its fault handler wrote."""
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
            raise RankError(
                f"a rank died between two programs ({reason}); a script that starts ranks must do so under "
                'if __name__ == "__main__":',
                rank=number,
                reason=reason,
            ) from None
        if message != READY:
            raise AssertionError(f"a rank said {message[:20]!r} instead of that it is ready")


def _collect(ranks: Sequence[_PoolRank], deadline: float) -> tuple[dict[int, bytes], list[RankFailure]]:
    """Wait for every rank's outcome, until the deadline or until grace after a failure is over."""
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
                rank = ranks[number]
                failures.append(RankFailure.from_exit_code(rank.exitcode(), number, rank.stack()))
                continue
            if outcome.failure is not None:
                failures.append(outcome.failure)
            else:
                assert outcome.value is not None
                values[number] = outcome.value
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
    # Nobody failed of its own accord: some rank did not come.
    numbers = ", ".join(map(str, unfinished))
    where = _read_stacks([(number, ranks[number]) for number in unfinished])
    if cause is not None:
        return RankError.from_failure(
            cause, world_size=world, function=name, remark=f"ranks that had not finished: {numbers}\n{where}"
        )
    reason = f"ranks that had not finished after {timeout:g} s: {numbers}"
    return RankError(f"{name} timed out on {world} ranks ({reason})\n{where}", rank=unfinished[0], reason=reason)


def _read_stacks(ranks: list[tuple[int, _PoolRank]]) -> str:
    """Where each of the ranks is now, innermost call first."""
    for _, rank in ranks:
        rank.request_stack()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and not all(rank.stack() for _, rank in ranks):
        time.sleep(0.01)
    parts = []
    for number, rank in ranks:
        frames = [line for line in rank.stack().splitlines() if line.startswith("  File")]
        parts.append("\n".join([f"rank {number} was in (most recent call first):", *frames[:MAX_FRAMES]]))
    return "\n".join(parts)
