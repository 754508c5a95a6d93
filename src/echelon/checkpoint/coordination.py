"""All ranks' word on a checkpoint, over a group of their own.

A thread in the background and the training loop both send messages; on one group they would be taken for each other's.
This group is on the CPU (gloo) also where training talks by NCCL, and only one thread at a time uses it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_TIMEOUT = timedelta(hours=2)
"""a slow disk is no failure"""

T = TypeVar("T")


class CheckpointGroup:
    """Every rank of the world makes one, in the same order as other groups."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if several else None

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """Every rank's, on the first rank; nothing elsewhere."""
        if self._group is None:
            return [mine]
        found: list[T | None] | None = [None] * self.size if self.is_rank_zero else None
        dist.gather_object(mine, found, dst=0, group=self._group)
        return [one for one in found or () if one is not None]

    def broadcast(self, value: T) -> T:
        """The first rank's."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def all_gather(self, mine: T) -> list[T]:
        """The first rank gathers, and tells everybody."""
        return self.broadcast(self.gather(mine))

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Sums of int64 over the ranks, which wrap around."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def raise_on_all_ranks(group: CheckpointGroup, error: Exception | None) -> None:
    """Raises on every rank what went wrong on some."""
    words = group.all_gather("" if error is None else f"{type(error).__name__}: {error}")
    wrong = {word: rank for rank, word in reversed(list(enumerate(words))) if word}
    if error is not None and len(wrong) == 1:
        raise error
    if wrong:
        from echelon.checkpoint.checkpoint_index import CheckpointError

        first, rank = min(wrong.items(), key=lambda found: found[1])
        kind, _, text = first.partition(": ")
        text = text if kind == CheckpointError.__name__ else first
        raise CheckpointError(text if group.size == 1 else f"{text} (on rank {rank})")


def int64_zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
