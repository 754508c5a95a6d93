"""The ranks of a mesh axis as threads of one process: collectives without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PATIENCE = 60.0


class DoneWork:
    def wait(self) -> None:
        return None


class ThreadRank:
    """One thread's view of the axis: some collectives of `MeshAxis`. `dropped` ones do nothing."""

    name = "tp"

    def __init__(self, index: int, slots: list[Any], barrier: threading.Barrier, dropped: str = "") -> None:
        self.index, self.size, self._slots, self._barrier, self._dropped = index, len(slots), slots, barrier, dropped
        self.issued: list[str] = []
        self.ranks = tuple(range(self.size))

    def _exchange(self, op: str, tensor: Tensor) -> list[Tensor]:
        self.issued.append(op)
        self._slots[self.index] = tensor.detach().clone()
        self._barrier.wait(PATIENCE)
        found = [slot.clone() for slot in self._slots]
        self._barrier.wait(PATIENCE)
        return [tensor] * self.size if op == self._dropped else found

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        found = self._exchange("all_reduce", tensor)
        return tensor if self._dropped == "all_reduce" else tensor.copy_(torch.stack(found).sum(0))

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self._exchange("broadcast", tensor)[0])

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", tensor))

    def start_reduce_scatter(self, shard: Tensor, full: Tensor) -> DoneWork:
        found = self._exchange("reduce_scatter", full)
        total = full if self._dropped == "reduce_scatter" else torch.stack(found).sum(0)
        shard.copy_(total.view(self.size, -1)[self.index])
        return DoneWork()

    def start_all_to_all(self, received: Tensor, sent: Tensor) -> DoneWork:
        found = self._exchange("all_to_all", sent)
        received.copy_(torch.stack([each[self.index] for each in found]))
        return DoneWork()


def run_on_threads(size: int, work: Callable[[Any], Any], dropped: str = "") -> list[Any]:
    """Run `work` with the axis of each rank, and return the results in the order of ranks."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def rank(index: int) -> Any:
        try:
            return work(ThreadRank(index, slots, barrier, dropped))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
