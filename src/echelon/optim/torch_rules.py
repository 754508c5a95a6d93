"""torch's own optimizers for a rule: what `verify` holds ours against, and what shards on a CPU are updated by."""

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
    """torch's optimizer for a rule and a one-device model's parameters, by name: matrices decay, vectors do not."""
    given = [optimizer_groups.parse(text) for text in rule.groups]
    found = [
        (p, optimizer_groups.settings_for(given, rule, name, decays=p.dim() >= 2)) for name, p in parameters.items()
    ]
    return torch_optimizer_for(rule, found, fused=fused)


def torch_optimizer_for(
    rule: UpdateRule, params: Sequence[tuple[Tensor, ParamSettings]], *, fused: bool
) -> torch.optim.Optimizer:
    """The same for tensors with settings of their own."""
    kinds: dict[ParamSettings, list[Tensor]] = {}
    for tensor, setting in params:
        kinds.setdefault(setting, []).append(tensor)
    made = [
        {"params": tensors, "weight_decay": kind.weight_decay, "lr": rule.lr * kind.lr_factor, "factor": kind.lr_factor}
        for kind, tensors in kinds.items()
    ]
    if rule.name == "adamw":
        return torch.optim.AdamW(made, lr=rule.lr, betas=resolve_betas(rule), eps=rule.eps, fused=fused)
    if rule.name == "sgd":
        return torch.optim.SGD(made, lr=rule.lr, momentum=resolve_momentum(rule), fused=fused)
    raise ValueError(f"torch's optimizers are not ours of this name (optimizer.name={rule.name}); use adamw or sgd")
