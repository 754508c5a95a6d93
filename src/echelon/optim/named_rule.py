"""An update rule by its name, with what is usual of it. No torch: plans compare rules that nobody configured."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.optim.optimizer_groups import ADAMW_PATTERNS


@dataclass(frozen=True, kw_only=True)
class DefaultRule:
    name: str = "adamw"
    lr: float = 3e-3
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float | None = None
    states: str = "float32"
    groups: tuple[str, ...] = ()
    by_adamw: tuple[str, ...] = ADAMW_PATTERNS
    ema: float = 0.0
    in_backward: bool = False
