"""Loss scaling: float16 ends at 6e-8, and gradients lie lower. Backward starts from the loss times a scale instead.

    step    gradients        scale                        update
    good    finite           times 2 after `every` good   with gradients / scale
    bad     not finite       half                         none: weights, moments and their count stay

Scale and count are on the device, and change there: whether a step was good is known to the norm, which all ranks
share, and nobody waits for it. A fixed scale stays what it is, and a bad step is left out all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
MAX_SCALE, MIN_SCALE = 2.0**24, 2.0**-24
"""between which a dynamic scale stays"""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """What a run is asked to scale by."""

    start: float = 1.0
    """the first scale, and with `every` = 0 the only one"""
    every: int = 0
    """good steps after which it doubles; 0: it does not change"""

    @classmethod
    def dynamic(cls, *, start: float = INITIAL_SCALE, every: int = GROWTH_INTERVAL) -> LossScale:
        return cls(start=start, every=every)

    def __post_init__(self) -> None:
        if not 0 < self.start < float("inf") or self.every < 0:
            raise ValueError(
                f"a loss scale is a number above 0 that doubles every so many steps (start {self.start}, "
                f"every {self.every}); use for instance start={INITIAL_SCALE:g}, every={GROWTH_INTERVAL}"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.every > 0

    @property
    def is_one(self) -> bool:
        """Nothing is scaled."""
        return self.start == 1.0 and not self.every

    def __str__(self) -> str:
        if self.is_one:
            return "none"
        return f"dynamic, from {self.start:g}" if self.is_dynamic else f"{self.start:g}, fixed"


class LossScaler:
    """The scale of a run, on the device."""

    def __init__(self, recipe: LossScale, device: torch.device):
        self.recipe = recipe
        self.scale = torch.tensor(recipe.start, dtype=torch.float64, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        """good steps since it last changed"""

    @torch.no_grad()
    def update(self, finite: Tensor, had_targets: Tensor) -> None:
        """A step's gradients were all finite, or not. One without a target (not live) says nothing of the scale."""
        if not self.recipe.is_dynamic:
            return
        good = self.good_steps + had_targets
        grown = good >= self.recipe.every
        higher = torch.where(grown, (self.scale * 2.0).clamp(max=MAX_SCALE), self.scale)
        self.scale = torch.where(finite, higher, (self.scale * 0.5).clamp(min=MIN_SCALE))
        self.good_steps = torch.where(finite & ~grown, good, 0)
