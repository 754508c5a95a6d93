"""Loss scaling: float16 underflows below 6e-8, and gradients are smaller. Backward starts from the loss times a scale.

    step    gradients        scale                        update
    good    finite           times 2 after `every` good   with gradients / scale
    bad     not finite       half                         none: weights, moments and step counts stay

Scale and counts are on the device, and change there: the gradient norm, which all ranks share, decides whether a step
was good, and the host does not wait for it. A fixed scale does not change, and bad steps are skipped all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
MAX_SCALE, MIN_SCALE = 2.0**24, 2.0**-24
"""bounds of a dynamic scale"""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The loss scale of a run, as configured."""

    start: float = 1.0
    """the initial scale; with `every` = 0 it is fixed"""
    every: int = 0
    """good steps after which it doubles; 0: never"""

    @classmethod
    def dynamic(cls, *, start: float = INITIAL_SCALE, every: int = GROWTH_INTERVAL) -> LossScale:
        return cls(start=start, every=every)

    def __post_init__(self) -> None:
        if not 0 < self.start < float("inf") or self.every < 0:
            raise ValueError(
                f"a loss scale must be positive and finite, with a growth interval of 0 or more (start {self.start}, "
                f"every {self.every}); use for example start={INITIAL_SCALE:g}, every={GROWTH_INTERVAL}"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.every > 0

    @property
    def is_one(self) -> bool:
        """Whether the loss is not scaled."""
        return self.start == 1.0 and not self.every

    def __str__(self) -> str:
        if self.is_one:
            return "none"
        return f"dynamic, from {self.start:g}" if self.is_dynamic else f"{self.start:g}, fixed"


class LossScaler:
    """The current loss scale, on the device."""

    def __init__(self, recipe: LossScale, device: torch.device):
        self.recipe = recipe
        self.scale = torch.tensor(recipe.start, dtype=torch.float64, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        """good steps since the last change"""

    @torch.no_grad()
    def update(self, finite: Tensor, had_targets: Tensor) -> None:
        """Update the scale after a step; steps without targets do not count."""
        if not self.recipe.is_dynamic:
            return
        good = self.good_steps + had_targets
        grown = good >= self.recipe.every
        higher = torch.where(grown, (self.scale * 2.0).clamp(max=MAX_SCALE), self.scale)
        self.scale = torch.where(finite, higher, (self.scale * 0.5).clamp(min=MIN_SCALE))
        self.good_steps = torch.where(finite & ~grown, good, 0)
