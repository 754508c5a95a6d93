"""Loss scaling: float16 underflows below 6e-8, and gradients are smaller. Backward starts from the loss times a scale.

    step    gradients        scale                        update
    good    finite           times 2 after `every` good   with gradients / scale
    bad     not finite       half                         none: weights, moments and step counts stay

Scale and counts are on the device, and change there: the gradient norm, which all ranks share, decides whether a step
was good, and the host does not wait for it. A fixed scale does not change, and bad steps are skipped all the same.

Stages of an asynchronous pipeline update at different times: `DelayedLossScaler`.
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


class DelayedLossScaler:
    """The loss scale of updates whose gradients are known to be finite only later (asynchronous pipelines).

    An overflow halves the scale that its update used, unless a smaller one is in force already: updates that began
    before the overflow was known would halve it again. Good updates count if they used the scale in force. It is on
    the host; `write` stores it in the `LossScaler`, of which a checkpoint has the state.
    """

    def __init__(self, scaler: LossScaler):
        self.recipe, self._scaler = scaler.recipe, scaler
        self.begin_stream()

    def begin_stream(self) -> None:
        """Read the stored scale; no update is in flight."""
        self.scale, self.good_updates = float(self._scaler.scale), int(self._scaler.good_steps)
        self._used: dict[int, float] = {}

    def begin(self, update: int) -> None:
        """Note that an update begins with the scale in force."""
        self._used[update] = self.scale

    def report(self, update: int, *, finite: bool, had_targets: bool) -> None:
        """Adapt the scale to an update; updates are reported in order."""
        used = self._used.pop(update)
        if not finite and used <= self.scale:
            self.scale, self.good_updates = max(used / 2, MIN_SCALE), 0
        elif finite and had_targets and used == self.scale:
            self.good_updates += 1
            if self.good_updates >= self.recipe.every:
                self.scale, self.good_updates = min(2 * self.scale, MAX_SCALE), 0

    def write(self) -> None:
        """Store the scale."""
        self._scaler.scale.fill_(self.scale)
        self._scaler.good_steps.fill_(self.good_updates)
