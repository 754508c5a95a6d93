"""Coordination of all ranks during a save or load, over a process group of its own.

The background thread and the training loop both issue collectives; on one group they would be confused. This group is
gloo even where training uses NCCL, and only one thread at a time uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_TIMEOUT = timedelta(hours=2)
"""long, because a slow disk is no failure"""

T = TypeVar("T")


class CheckpointGroup:
    """The process group of checkpoints. Every rank creates one, in the same order as other groups."""

    def __init__(self) -> None:
        is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if is_distributed else None

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Gather every rank's value on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[T | None] | None = [None] * self.size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return [value for value in values or () if value is not None]

    def broadcast(self, value: T) -> T:
        """Broadcast rank 0's value."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Gather every rank's value on every rank."""
        return self.broadcast(self.gather(value))

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Sum int64 tensors over the ranks, modulo 2^64."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


@contextmanager
def errors_on_all_ranks(group: CheckpointGroup) -> Iterator[None]:
    """Raise on every rank if one raises inside this context."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    raise_on_all_ranks(group, error)


def raise_on_all_ranks(group: CheckpointGroup, error: Exception | None) -> None:
    """Raise on every rank the first error of any rank."""
    messages = group.all_gather("" if error is None else f"{type(error).__name__}: {error}")
    failures = {message: rank for rank, message in reversed(list(enumerate(messages))) if message}
    if error is not None and len(failures) == 1:
        raise error
    if failures:
        from echelon.checkpoint.checkpoint_index import CheckpointError

        first, rank = min(failures.items(), key=lambda pair: pair[1])
        kind, _, text = first.partition(": ")
        text = text if kind == CheckpointError.__name__ else first
        raise CheckpointError(text if group.size == 1 else f"{text} (on rank {rank})")


def int64_zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
