"""The group of processes that this process belongs to.

torch is imported when a group is joined: `under_launcher` is asked before a configuration is checked, which is quick.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from echelon.launch.rendezvous import Rendezvous

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class World:
    """What one rank knows of all ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its number among the ranks of this machine."""
    device: torch.device
    backend: str = ""
    """As torch spells it: `gloo`, or `cpu:gloo,cuda:nccl`. Empty for one process without a process group."""

    @contextmanager
    def local_rank_zero_first(
        self, barrier_context: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """The first rank of each machine runs the block, then the others: what it left on disk is there for them.

        `around` is entered around the barrier.
        """
        import torch.distributed as dist

        if self.local_rank and self.backend:
            with barrier_context():
                dist.barrier()
        yield
        if not self.local_rank and self.backend:
            with barrier_context():
                dist.barrier()


def under_launcher() -> bool:
    """Whether a launcher (torchrun, or `echelon train --procs`) started this process and named its rank."""
    return all(name in os.environ for name in _LAUNCHER_VARIABLES)


@contextmanager
def join_process_group(
    device: str = "auto",
    timeout: float = 600.0,
    *,
    rendezvous: Rendezvous[Any] | None = None,
    world_size: int | None = None,
) -> Iterator[World]:
    """Join the ranks that the launcher started, for the length of a `with` block.

    Without a launcher this is a world of one, and no process group is made. Inside a process group that exists
    already, it is that group, which is left as it is. `device` is `auto`, `cpu` or `cuda`; `timeout` is in seconds,
    for one collective. Ranks that met before form the group by their meeting's store; `ranks` are the first so many
    that do, where others idle.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield _existing_world(device)
    elif not under_launcher():
        yield World(device=_choose_device(device, local_rank=0, local_world_size=1))
    else:
        with _new_process_group(device, timeout, rendezvous, world_size) as world:
            yield world


@contextmanager
def _new_process_group(
    device: str, timeout: float, meeting: Rendezvous[Any] | None, ranks: int | None
) -> Iterator[World]:
    import torch
    import torch.distributed as dist

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    world_size = ranks or world_size
    where = _choose_device(device, local_rank=local_rank, local_world_size=local_world_size)
    # On CUDA too there is a group on the CPU, for checkpoints in the background and for small Python objects.
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    threads = torch.get_num_threads()
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(max(1, available_cores() // local_world_size))
    dist.init_process_group(
        backend=backend,
        store=meeting.store if meeting is not None else None,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=where if where.type == "cuda" else None,
    )
    try:
        yield World(rank=rank, world_size=world_size, local_rank=local_rank, device=where, backend=backend)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Models and axes form cycles that hold groups, and a group that lives on has threads. One that wants Python's
        # lock while the interpreter ends is aborted, and the process with it.
        gc.collect()
        torch.set_num_threads(threads)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _existing_world(device: str) -> World:
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    backend = dist.get_backend_config()
    # A plain gloo group calls itself "cpu:gloo,cuda:gloo", also on a machine without CUDA.
    on_cuda = "cuda:nccl" in backend
    if device == "cuda" and not on_cuda:
        raise ValueError(f"device=cuda, but the process group is for the CPU (backend={backend}); use device=cpu")
    where = torch.device("cuda", local_rank) if on_cuda and device != "cpu" else torch.device("cpu")
    return World(rank=rank, world_size=world_size, local_rank=local_rank, device=where, backend=backend)


def _choose_device(device: str, *, local_rank: int, local_world_size: int) -> torch.device:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'unknown device (device="{device}"); use auto, cpu or cuda')
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and found < local_world_size:
        raise ValueError(
            f"device=cuda needs one CUDA device per rank of this machine (ranks={local_world_size}, devices={found}); "
            "use fewer ranks, or device=cpu"
        )
    use_cuda = device != "cpu" and found >= local_world_size
    return torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
