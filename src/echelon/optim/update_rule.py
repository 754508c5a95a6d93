"""Update rules: the hyperparameters an optimizer is built from. No torch, so that plans can price them."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.99), "lamb": (0.9, 0.999), "muon": (0.9, 0.95)}
"""Muon's are of the AdamW for its other parameters"""
DEFAULT_MOMENTUM = {"sgd": 0.0, "adafactor": 0.0, "sm3": 0.0, "muon": 0.95}
ADAMW_PATTERNS = ("*embed*", "*positions*", "*wte*", "*wpe*", "head.*", "*lm_head*")
"""names of matrices that Muon leaves to AdamW in common models: embeddings and the LM head"""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Hyperparameters of an optimizer; `OptimizerConfig` documents and checks each of them."""

    name: str = "adamw"
    lr: float = 3e-3
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float | None = None
    states: str = "float32"
    by_adamw: tuple[str, ...] = ADAMW_PATTERNS
    groups: tuple[str, ...] = ()
    ema: float = 0.0
    in_backward: bool = False


def resolve_betas(rule: UpdateRule) -> tuple[float, float]:
    return DEFAULT_BETAS[rule.name] if rule.betas is None else rule.betas


def resolve_momentum(rule: UpdateRule) -> float:
    """Return the rule's momentum, or its default; 0 where the optimizer has none."""
    return DEFAULT_MOMENTUM.get(rule.name, 0.0) if rule.momentum is None else rule.momentum
