"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state.

    1 ┤   ╭───────╮             ╭──────────╮           ╭───────────────
      │  ╱          ╲          ╱            ╲         ╱
final ┤ ╱             ╰───    ╱              ╲       ╱
      └──────────────────    ──────────────────     ──────────────────
       cosine                 wsd                    constant
"""

from __future__ import annotations

import math
from collections.abc import Callable

from echelon.config.run_config import Config
from echelon.config.sections import LRScheduleConfig


def learning_rate(step: int, total: int, config: Config) -> float:
    """Return the learning rate of step `step` (from 0) of `total`."""
    return config.optimizer.lr * lr_factor(step, total, config.schedule)


def lr_factor(step: int, total: int, schedule: LRScheduleConfig) -> float:
    """Return the fraction of the peak, in (0, 1] where `schedule.final` is above 0.

    The warm-up starts above 0, the peak is reached at step `warmup`, and the last step of a decay is exactly `final`.
    A run shorter than its warm-up ends before the peak; where warm-up and decay overlap, the smaller one counts.
    """
    if step < 0 or total < 1:
        raise ValueError(f"a step is counted from 0 in a run of at least one (step {step} of {total})")
    rising = min(1.0, (step + 1) / (schedule.warmup + 1))
    return min(rising, LR_SHAPES[schedule.name](step, total, schedule))


def _cosine(step: int, total: int, schedule: LRScheduleConfig) -> float:
    progress = (step - schedule.warmup) / max(1, total - 1 - schedule.warmup)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return schedule.final + (1 - schedule.final) * fall


def _wsd(step: int, total: int, schedule: LRScheduleConfig) -> float:
    decaying = round(schedule.decay * total)
    left = max(0, total - 1 - step)
    if left >= decaying:
        return 1.0
    return schedule.final + (1 - schedule.final) * left / decaying


LR_SHAPES: dict[str, Callable[[int, int, LRScheduleConfig], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": lambda step, total, schedule: 1.0,
}
