"""What a step did, read when somebody asks: until then nobody waits for the device, or for other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class StepResult:
    """What a step did, equal on every rank. Reading it may wait for ranks that are not through with the step yet."""

    def __init__(self, read: Callable[[], Sequence[float]], read_norms: Callable[[], list[float]] | None = None):
        self._read = read
        self.read_norms = read_norms or list
        """asks for the norms of this rank's parts of gradients, where that is of interest"""

    @classmethod
    def from_values(
        cls, loss_sum: float, count: float, norm: float, scale: float = 1.0, next_scale: float = 1.0
    ) -> StepResult:
        """What is known already."""
        return cls(lambda: (loss_sum, count, norm, scale, next_scale))

    def __reduce__(self) -> tuple[Any, tuple[float, ...]]:
        """Between processes what is told travels, not the asking."""
        return StepResult.from_values, self._values

    @cached_property
    def _values(self) -> tuple[float, float, float, float, float]:
        """(sum of losses, number of valid targets, norm, loss scale, loss scale of the next step)"""
        loss_sum, count, norm, scale, next_scale = self._read()
        return loss_sum, count, norm, scale, next_scale

    def wait(self) -> None:
        """Until the step is through."""
        _ = self._values

    @property
    def loss(self) -> float:
        """mean over all valid targets of the step; 0 where there is none"""
        return self._values[0] / max(self._values[1], 1.0)

    @property
    def count(self) -> int:
        """valid targets of the step"""
        return int(self._values[1])

    @property
    def norm(self) -> float:
        """of the mean loss's gradient, before clipping"""
        return self._values[2]

    @property
    def finite(self) -> bool:
        """the loss and all gradients are"""
        return math.isfinite(self._values[0]) and math.isfinite(self.norm)

    @property
    def skipped(self) -> bool:
        """no valid target, or something is not finite: nothing was updated"""
        return self.count == 0 or not self.finite

    @property
    def loss_scale(self) -> float:
        """of this step"""
        return self._values[3]

    @property
    def next_loss_scale(self) -> float:
        """of the step after it"""
        return self._values[4]


def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device. From memory that the system may move, a copy to a GPU would wait for the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=True)


def start_host_copy(tensor: Tensor) -> Callable[[], list[float]]:
    """Asks for the numbers of a tensor as they are now. Who asks waits for what made them, and for nothing after it."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    come = torch.cuda.Event()
    come.record()

    def ask() -> list[float]:
        come.synchronize()
        return here.tolist()

    return ask
