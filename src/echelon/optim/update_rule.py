"""What an update rule is made from. No torch, so that plans can ask for its cost."""

from __future__ import annotations

from typing import Protocol

DEFAULT_BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.99), "lamb": (0.9, 0.999), "muon": (0.9, 0.95)}
"""where none are given; Muon's are of the AdamW beside it"""
DEFAULT_MOMENTUM = {"sgd": 0.0, "adafactor": 0.0, "sm3": 0.0, "muon": 0.95}
"""where none is given"""


class UpdateRule(Protocol):
    """What an update rule is made from; `OptimizerConfig` is one."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float] | None: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def momentum(self) -> float | None: ...
    @property
    def states(self) -> str: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    @property
    def by_adamw(self) -> tuple[str, ...]: ...
    @property
    def ema(self) -> float: ...
    @property
    def in_backward(self) -> bool: ...


def resolve_betas(rule: UpdateRule) -> tuple[float, float]:
    return DEFAULT_BETAS[rule.name] if rule.betas is None else rule.betas


def resolve_momentum(rule: UpdateRule) -> float:
    """0 where the rule has none."""
    return DEFAULT_MOMENTUM.get(rule.name, 0.0) if rule.momentum is None else rule.momentum
