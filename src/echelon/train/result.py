"""What a step did, read when somebody asks: until then nobody waits for the device, or for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any


class StepResult:
    """What a step did, equal on every rank. Reading it may wait for ranks that are not through with the step yet."""

    def __init__(self, ask: Callable[[], Sequence[float]]):
        self._ask = ask

    @classmethod
    def of(cls, loss_sum: float, count: float, norm: float) -> StepResult:
        """What is known already."""
        return cls(lambda: (loss_sum, count, norm))

    def __reduce__(self) -> tuple[Any, tuple[float, float, float]]:
        """Between processes what is told travels, not the asking."""
        return StepResult.of, self._told

    @cached_property
    def _told(self) -> tuple[float, float, float]:
        """(sum of losses, number of valid targets, norm)"""
        loss_sum, count, norm = self._ask()
        return loss_sum, count, norm

    def wait(self) -> None:
        """Until the step is through."""
        _ = self._told

    @property
    def loss(self) -> float:
        """mean over all valid targets of the step; 0 where there is none"""
        return self._told[0] / max(self._told[1], 1.0)

    @property
    def count(self) -> int:
        """valid targets of the step"""
        return int(self._told[1])

    @property
    def norm(self) -> float:
        """of the mean loss's gradient, before clipping"""
        return self._told[2]

    @property
    def skipped(self) -> bool:
        """no valid target: nothing was updated"""
        return self.count == 0
