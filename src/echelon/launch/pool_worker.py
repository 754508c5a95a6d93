"""A rank process of the pool: it runs one task after another, each in a new process group.

[Note: the protocol of pool and rank]

      pool                                    rank
       | <------------- READY ------------------|   once, after start
       |------------- PoolTask ---------------->|
       |                                        |   joins the group, calls the function
       | <---------- TaskOutcome ---------------|
       |--------------- LEAVE ----------------->|   only after every rank has succeeded
       |                                        |   destroys the group
       | <------------- READY ------------------|

No rank leaves the group while another still runs, so a rank that has finished never breaks the connections of its
peers. A rank that failed keeps its group and its connections too: its peers do not fail in consequence, and the pool
ends them all.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echelon.compat import clear_sharding_cache
from echelon.launch.forkserver import begin_rank
from echelon.launch.rank_failure import RankFailure
from echelon.launch.serialize import deserialize, serialize
from echelon.launch.world import LOOPBACK, leave_process_group, use_loopback

READY = b"ready"
LEAVE = b"leave"


@dataclass(frozen=True, kw_only=True)
class PoolTask:
    """A task of one rank."""

    name: str
    """Unique in the pool; the prefix of the task's keys in the store."""
    rank: int
    world: int
    timeout: float
    """Seconds, for each collective."""
    device: str
    """`cpu`, with gloo, or `cuda`, with a GPU for each rank and NCCL."""
    sys_path: list[str]
    """The `sys.path` of the pool's process."""
    call: bytes
    """(function, args, kwargs), serialized; deserialized after `sys_path` is set."""


TaskOutcome = bytes | RankFailure
"""The function's return value, serialized, or the failure of the rank."""


def serve_tasks(pool: Connection, port: int, stack_file: str) -> None:
    """Run tasks until the pool closes the connection. On SIGUSR1 or a crash, `stack_file` gets this rank's stack."""
    # Ctrl-C reaches every process of the terminal; the pool handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin_rank()
    torch.set_num_threads(1)
    use_loopback()
    store = TCPStore(LOOPBACK, port, is_master=False)
    # Objects of the fork server are never garbage; without this every collection walks all of torch.
    gc.freeze()
    with open(stack_file, "w") as file:
        # Handlers in C run inside a blocked collective and in a loop that holds the GIL. An abort in one of gloo's
        # threads has no Python stack, so it writes the stacks of all threads.
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        faulthandler.enable(file=file, all_threads=True)
        try:
            pool.send_bytes(READY)
            while True:
                task: PoolTask = deserialize(pool.recv_bytes())
                pool.send_bytes(serialize(_run_task(task, store)))
                if pool.recv_bytes() != LEAVE:
                    raise AssertionError("the pool sent a task to a rank that had not left the group of the last one")
                leave_process_group()
                if "torch.distributed.tensor" in sys.modules:
                    clear_sharding_cache()
                pool.send_bytes(READY)
        except (EOFError, ConnectionError):
            return


def _run_task(task: PoolTask, store: Store) -> TaskOutcome:
    try:
        sys.path[:] = task.sys_path
        function, args, kwargs = deserialize(task.call)
        # A task must not depend on the previous one.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        if task.device == "cuda":
            torch.cuda.set_device(task.rank)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo",
            store=PrefixStore(task.name, store),
            rank=task.rank,
            world_size=task.world,
            timeout=timedelta(seconds=task.timeout),
        )
        return serialize(function(*args, **kwargs))
    except BaseException as error:
        return RankFailure.from_exception(error, task.rank)
