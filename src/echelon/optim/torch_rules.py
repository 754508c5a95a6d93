"""Torch's own optimizers for an update rule: the reference that `verify` compares with, and the CPU's fused updates.

This file knows nothing of shards and ranks, so that the reference imports none of the code it judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from echelon.optim import optimizer_groups
from echelon.optim.optimizer_groups import ParamSettings
from echelon.optim.update_rule import UpdateRule, resolve_betas, resolve_momentum


def build_torch_optimizer(
    rule: UpdateRule, parameters: Mapping[str, Tensor], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Build torch's optimizer for a one-device model's parameters, by name: matrices decay, vectors do not."""
    groups = [optimizer_groups.parse(text) for text in rule.groups]
    params = [
        (p, optimizer_groups.settings_for(groups, rule, name, decays=p.dim() >= 2)) for name, p in parameters.items()
    ]
    return torch_optimizer_for(rule, params, fused=fused)


def torch_optimizer_for(
    rule: UpdateRule, params: Sequence[tuple[Tensor, ParamSettings]], *, fused: bool
) -> torch.optim.Optimizer:
    """Build torch's optimizer for tensors with given settings."""
    by_settings: dict[ParamSettings, list[Tensor]] = {}
    for tensor, settings in params:
        by_settings.setdefault(settings, []).append(tensor)
    groups = [
        {"params": tensors, "weight_decay": each.weight_decay, "lr": rule.lr * each.lr_factor, "factor": each.lr_factor}
        for each, tensors in by_settings.items()
    ]
    if rule.name == "adamw":
        return torch.optim.AdamW(groups, lr=rule.lr, betas=resolve_betas(rule), eps=rule.eps, fused=fused)
    if rule.name == "sgd":
        return torch.optim.SGD(groups, lr=rule.lr, momentum=resolve_momentum(rule), fused=fused)
    raise ValueError(f"torch has no equivalent optimizer (optimizer.name={rule.name}); use adamw or sgd")
