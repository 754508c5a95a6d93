"""The process group that this process belongs to.

torch is imported only to join a group: `under_launcher` is called before a configuration is checked, which must be
quick.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from echelon.layout.validation_error import ValidationError, ValidationIssue

LOOPBACK = "127.0.0.1"

if TYPE_CHECKING:
    import torch

    from echelon.launch.rendezvous import Rendezvous

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPTIONAL_VARIABLES = ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
UNSET_HINT = "if no launcher started this process, unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
WAIT_NOTICE_S = 15.0
"""seconds after which a rank that waits for the others prints that it does"""
FILES_PER_PROCESS, FILES_PER_RANK = 64, 16
"""open files that a launcher requires, and more per rank: pipes, sockets, logs"""


class JoinError(RuntimeError):
    """The ranks that the environment describes do not form a process group."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank, the number of ranks, and the rank's device and backend."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The rank's number on its node."""
    device: torch.device
    backend: str = ""
    """As torch spells it: `gloo`, or `cpu:gloo,cuda:nccl`. Empty for one process without a process group."""

    @contextmanager
    def local_rank_zero_first(
        self, barrier_context: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Run the block on local rank 0 of each node first, then on the others, which find its files on disk.

        `barrier_context` is entered around the barrier.
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
    """Whether a launcher (torchrun, or `echelon train --procs`) started this process and set its rank."""
    return all(name in os.environ for name in _LAUNCHER_VARIABLES)


def local_world_size(default: int) -> int:
    """The ranks of this node that a launcher started, or that formed a group; `default` where it is unknown."""
    distributed = sys.modules.get("torch.distributed")
    is_known = under_launcher() or (distributed is not None and distributed.is_initialized())
    return int(os.environ.get("LOCAL_WORLD_SIZE", default)) if is_known else default


def environment_issues(num_ranks: int = 0) -> list[ValidationIssue]:
    """Check the launcher's variables, the network interface, and the open files that new ranks require."""
    names = (*_LAUNCHER_VARIABLES, *_OPTIONAL_VARIABLES) if under_launcher() else ()
    issues = [issue for name in names if (issue := _number_issue(name)) is not None]
    if under_launcher() and not issues and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        message = f"is not a rank of WORLD_SIZE={os.environ['WORLD_SIZE']}"
        issues.append(ValidationIssue("RANK", os.environ["RANK"], message, hint=UNSET_HINT))
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(INTERFACE_VARIABLE, "").split(",")):
        if name not in known:
            message = "names no network interface of this machine"
            issues.append(ValidationIssue(INTERFACE_VARIABLE, name, message, legal=", ".join(known)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = FILES_PER_PROCESS + FILES_PER_RANK * num_ranks
    if num_ranks and soft != resource.RLIM_INFINITY and soft < required:
        if hard == resource.RLIM_INFINITY or hard >= required:
            resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))
        else:
            message = f"open files are too few for {num_ranks} rank(s), which require {required}"
            issues.append(ValidationIssue("ulimit -n", str(hard), message, hint=f"raise it: ulimit -n {required}"))
    return issues


def _number_issue(name: str) -> ValidationIssue | None:
    text = os.environ.get(name, "0")
    if name == "MASTER_ADDR" or (text.isdecimal() and len(text) < 10):
        return None
    return ValidationIssue(name, text, "is not a number that a launcher sets", hint=UNSET_HINT)


def refuse_bad_environment(num_ranks: int = 0) -> None:
    """Raise ValidationError where ranks cannot work, before they start."""
    if issues := environment_issues(num_ranks):
        raise ValidationError(issues)


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Print after a while that this rank waits for the others, and raise JoinError if they do not come."""
    import torch.distributed as dist

    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    who = f"rank {rank} of {size}"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    notice = f"echelon: {who} waits for the other ranks ({where}); {UNSET_HINT}"
    timer = threading.Timer(WAIT_NOTICE_S, lambda: print(notice, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (dist.DistError, TimeoutError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        cause = f"{where}: {text[:1].lower()}{text[1:]}"
        raise JoinError(f"{who} cannot join the others ({cause}); check their logs, or, {UNSET_HINT}") from error
    finally:
        timer.cancel()


@contextmanager
def join_process_group(
    device: str = "auto",
    timeout: float = 600.0,
    *,
    rendezvous: Rendezvous[Any] | None = None,
    world_size: int | None = None,
) -> Iterator[World]:
    """Join the process group of the ranks that the launcher started, for the length of a `with` block.

    Without a launcher this is a world of one rank without a process group. An existing process group is used and left
    unchanged. `device` is `auto`, `cpu` or `cuda`; `timeout` is in seconds per collective. After a rendezvous its store
    forms the group; `world_size` is the number of ranks that take part where the others idle.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield _existing_world(device)
        return
    if not under_launcher():
        yield World(device=_choose_device(device, local_rank=0, local_world_size=1))
        return
    rank, num_launched, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    num_local = local_world_size(num_launched)
    world_size = world_size or num_launched
    torch_device = _choose_device(device, local_rank=local_rank, local_world_size=num_local)
    # On CUDA there is a gloo group too, for background checkpoints and for small Python objects.
    backend = "cpu:gloo,cuda:nccl" if torch_device.type == "cuda" else "gloo"
    threads = torch.get_num_threads()
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    else:
        torch.set_num_threads(max(1, available_cores() // num_local))
    with waiting_for_ranks():
        dist.init_process_group(
            backend=backend,
            store=rendezvous.store if rendezvous is not None else None,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=torch_device if torch_device.type == "cuda" else None,
        )
    try:
        yield World(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device, backend=backend)
    finally:
        leave_process_group()
        torch.set_num_threads(threads)


def leave_process_group() -> None:
    """Destroy the process group, and what holds it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # Models and mesh axes form reference cycles that hold process groups. A group that survives has sockets and
    # threads, and one that takes the GIL while the interpreter exits aborts the process.
    gc.collect()


def use_loopback() -> None:
    """Make gloo use the loopback interface in this process, unless the user has named one.

    By default gloo resolves the host name, which fails or takes seconds on a laptop that changes networks.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault(INTERFACE_VARIABLE, names[0])


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _existing_world(device: str) -> World:
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    backend = dist.get_backend_config()
    # A plain gloo group reports "cpu:gloo,cuda:gloo", also on a node without CUDA.
    on_cuda = "cuda:nccl" in backend
    if device == "cuda" and not on_cuda:
        raise ValueError(f"device=cuda, but the process group is for the CPU (backend={backend}); use device=cpu")
    torch_device = torch.device("cuda", local_rank) if on_cuda and device != "cpu" else torch.device("cpu")
    return World(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device, backend=backend)


def _choose_device(device: str, *, local_rank: int, local_world_size: int) -> torch.device:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'unknown device (device="{device}"); use auto, cpu or cuda')
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and num_devices >= local_world_size:
        return torch.device("cuda", local_rank)
    if device == "cuda":
        raise ValueError(
            f"device=cuda requires one CUDA device per rank of this node (ranks={local_world_size}, "
            f"devices={num_devices}); use fewer ranks, or device=cpu"
        )
    return torch.device("cpu")
