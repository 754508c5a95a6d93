"""A rank process of the pool: it waits for a case, runs it in a process group of its own, and waits for the next.

[Note: the talk between pool and rank]

      pool                                    rank
       | <------------- READY ------------------|   once, after start
       |--------------- Case ------------------>|
       |                                        |   joins the group, calls the function
       | <------------ Outcome -----------------|
       |--------------- LEAVE ----------------->|   only after every rank's outcome was good
       |                                        |   destroys the group
       | <------------- READY ------------------|

No rank leaves the group while another still runs, so a case that is good on one rank never breaks the connections of
its peers. A rank that failed keeps its group and its connections too: its peers stay where they are instead of
failing in its wake, and the pool ends them all.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.compat import clear_sharding_cache
from echelon.launch.forkserver import MASKED_SIGNALS, end_with_parent
from echelon.launch.loopback import ADDRESS, use_loopback
from echelon.launch.rank_failure import RankFailure
from echelon.launch.serialize import deserialize, serialize

READY = b"ready"
LEAVE = b"leave"


@dataclass(frozen=True, kw_only=True)
class PoolTask:
    """What one rank is to do."""

    name: str
    """Unique in the pool; the prefix of the case's keys in the store."""
    rank: int
    world: int
    timeout: float
    """Seconds that a collective may take."""
    sys_path: list[str]
    """The parent's `sys.path`: what it can import, the rank can import."""
    call: bytes
    """A parcel of (function, args, kwargs); opened after `path` is set."""


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """What came of it. Exactly one of the two is set."""

    value: bytes | None = None
    """A parcel of the function's return value."""
    failure: RankFailure | None = None


def serve_tasks(pool: Connection, port: int, stack_file: str) -> None:
    """Run cases until the pool hangs up. The file `stacks` gets this rank's stack, on SIGUSR1 or when it crashes."""
    # Ctrl-C reaches every process of the terminal; the pool is the one that answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED_SIGNALS)
    end_with_parent()
    torch.set_num_threads(1)
    use_loopback()
    store = TCPStore(ADDRESS, port, is_master=False)
    # What came with the fork server is never garbage; without this every collection walks all of torch.
    gc.freeze()
    with open(stack_file, "w") as file:
        # Handlers in C: they answer from inside a blocked collective and from a loop that never lets go. An abort in
        # one of gloo's threads has no Python stack, so there all threads are written.
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        faulthandler.enable(file=file, all_threads=True)
        try:
            pool.send_bytes(READY)
            while True:
                case: PoolTask = deserialize(pool.recv_bytes())
                outcome = _run_task(case, store)
                pool.send_bytes(serialize(outcome))
                if pool.recv_bytes() != LEAVE:
                    raise AssertionError("the pool sent a case to a rank that had not left the last one")
                _leave_group()
                pool.send_bytes(READY)
        except (EOFError, ConnectionError):
            return


def _run_task(case: PoolTask, store: Store) -> TaskOutcome:
    try:
        sys.path[:] = case.sys_path
        function, args, kwargs = _deserialize_call(case.call)
        # A case must not depend on the one before it.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        dist.init_process_group(
            backend="gloo",
            store=PrefixStore(case.name, store),
            rank=case.rank,
            world_size=case.world,
            timeout=timedelta(seconds=case.timeout),
        )
        return TaskOutcome(value=serialize(function(*args, **kwargs)))
    except BaseException as error:
        return TaskOutcome(failure=RankFailure.from_exception(error, case.rank))


def _deserialize_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    opened: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = deserialize(call)
    return opened


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Models and meshes form cycles that hold groups, and with them sockets and threads.
    gc.collect()
    if "torch.distributed.tensor" in sys.modules:
        clear_sharding_cache()
