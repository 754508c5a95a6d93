"""Small programs for the ranks of the pool, and of the launcher: what a test sends must be importable by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from cpu_clock import ALWAYS, patient
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from echelon.launch.world import World, join_process_group


def echo(*args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    return dist.get_rank(), args, kwargs


def total(value: float) -> float:
    """The sum over ranks of value · (rank + 1)."""
    tensor = torch.tensor([value * (dist.get_rank() + 1)], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def sharded_product(size: int) -> torch.Tensor:
    """A matmul of two DTensors on a mesh of all ranks, which fails when a mesh outlives its group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left = torch.arange(size * size, dtype=torch.float64).reshape(size, size)
    product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(left, mesh, [Shard(1)])
    return product.full_tensor()


def cpu_time() -> float:
    return time.process_time()


def holdings() -> tuple[int, int, int]:
    """This rank's pid, open files and threads, which a leak would increase."""
    return os.getpid(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settings() -> tuple[int, torch.dtype, float]:
    """Threads, default dtype and the first random number; changes the last two afterwards."""
    seen = torch.get_num_threads(), torch.get_default_dtype(), torch.rand(1).item()
    torch.set_default_dtype(torch.float64)
    return seen


def tensors(size: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    whole = torch.arange(size, dtype=torch.float32) + rank
    return {"whole": whole, "view": whole[:3], "half": whole[:3].bfloat16(), "none": whole[:0]}


def dtensor() -> torch.Tensor:
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def fail(rank: int, word: str) -> None:
    """One rank raises; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError(f"no {word} on rank {rank}")
    dist.barrier()


def fail_late_elsewhere(rank: int) -> None:
    """All ranks raise, one of them first."""
    dist.barrier()
    if dist.get_rank() != rank:
        time.sleep(patient(0.2))
    raise ValueError(f"raised on rank {dist.get_rank()}")


def die(rank: int) -> None:
    """One rank is killed while the others are in a collective with it."""
    if dist.get_rank() == rank:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(ALWAYS)
    dist.barrier()


def sleep(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    dist.barrier()


def sleep_apart(seconds: float) -> None:
    """No rank waits for another: gloo's own time-out cannot come first."""
    time.sleep(seconds)


def mismatch() -> None:
    """Ranks disagree about the size of a collective: gloo aborts a process."""
    dist.all_reduce(torch.ones(4 + 3 * dist.get_rank()))


def joined(value: float) -> tuple[World, float, int, str]:
    """The launcher's ranks make their own group. Prints, so that a test sees whose output shows."""
    with join_process_group("cpu", timeout=2 * ALWAYS) as world:
        print(f"rank {world.rank} prints", flush=True)
        return world, total(value), torch.get_num_threads(), dist.get_backend()


def fails_at_first(marker: str) -> None:
    """Rank 1 prints and fails in the first attempt."""
    if os.environ["RANK"] == "1":
        print(f"attempt after {os.path.exists(marker):d} failures", flush=True)
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise RuntimeError("at first")


def joined_and(program: str, *args: Any) -> None:
    """Another program of this file, inside a group that the ranks made themselves."""
    with join_process_group("cpu", timeout=2 * ALWAYS):
        globals()[program](*args)


def joined_twice() -> tuple[World, float, int, str]:
    """Joining inside a group changes nothing: the group serves on after the block."""
    world, *_ = joined(1.0)
    return world, total(1.0), torch.get_num_threads(), dist.get_backend()
