"""The result of a step, read on demand: until then the host waits neither for the device nor for other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from echelon.faults.flight_recorder import Waitable
from echelon.models.layers import INVALID_NUM_TARGETS, NUM_TARGETS_REMEDY


class StepResult:
    """Loss, gradient norm and loss scale of a step, equal on every rank. Reading it waits for all ranks."""

    def __init__(self, read: Callable[[], Sequence[float]], read_norms: Callable[[], list[float]] | None = None):
        self._read = read
        self.read_norms = read_norms or list
        """returns the norms of this rank's gradient slices"""

    @classmethod
    def from_values(
        cls, loss_sum: float, count: float, norm: float, scale: float = 1.0, next_scale: float = 1.0
    ) -> StepResult:
        """Return the result of a step whose numbers are known."""
        return cls(lambda: (loss_sum, count, norm, scale, next_scale))

    def __reduce__(self) -> tuple[Any, tuple[float, ...]]:
        """Pickle the numbers, not the function that reads them."""
        return StepResult.from_values, self._values

    @cached_property
    def _values(self) -> tuple[float, float, float, float, float]:
        """(sum of losses, number of valid targets, norm, loss scale, loss scale of the next step)"""
        loss_sum, count, norm, scale, next_scale = self._read()
        if not count >= 0:
            raise ValueError(f"{INVALID_NUM_TARGETS}; {NUM_TARGETS_REMEDY}")
        return loss_sum, count, norm, scale, next_scale

    def wait(self) -> None:
        """Wait until the step has ended on all ranks."""
        _ = self._values

    @property
    def loss(self) -> float:
        """mean loss over all valid targets of the step; 0 without any"""
        return self._values[0] / max(self._values[1], 1.0)

    @property
    def count(self) -> int:
        """valid targets of the step"""
        return int(self._values[1])

    @property
    def norm(self) -> float:
        """norm of the mean loss's gradient, before clipping"""
        return self._values[2]

    @property
    def finite(self) -> bool:
        """whether the loss and all gradients are finite"""
        return math.isfinite(self._values[0]) and math.isfinite(self.norm)

    @property
    def skipped(self) -> bool:
        """whether nothing was updated: without a valid target, or with a loss or gradient that is not finite"""
        return self.count == 0 or not self.finite

    @property
    def loss_scale(self) -> float:
        """loss scale of this step"""
        return self._values[3]

    @property
    def next_loss_scale(self) -> float:
        """loss scale of the next step"""
        return self._values[4]


def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to a device without waiting; a copy from pageable memory to a GPU would wait for the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


def start_host_copy(tensor: Tensor, after: Waitable | None = None) -> Callable[[], list[float]]:
    """Start a copy of a tensor to the host; the returned function waits for it, but not for later work.

    `after` is a collective in flight that writes the tensor.
    """
    if tensor.device.type != "cuda":

        def wait_and_read() -> list[float]:
            if after is not None:
                after.wait()
            return tensor.tolist()

        return wait_and_read
    if after is not None:
        after.wait()  # on the device, not on the host
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return pinned.tolist()

    return read
