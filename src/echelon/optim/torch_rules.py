"""torch's own optimizers for a rule: what `verify` holds ours against, and what shards on a CPU are updated by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from echelon.optim import optimizer_groups
from echelon.optim.optimizer_groups import Setting
from echelon.optim.update_rule import Rule, betas_of, momentum_of


def build(rule: Rule, parameters: Mapping[str, Tensor], *, fused: bool = False) -> torch.optim.Optimizer:
    """torch's optimizer for a rule and a one-device model's parameters, by name: matrices decay, vectors do not."""
    given = [optimizer_groups.parse(text) for text in rule.groups]
    found = [(p, optimizer_groups.setting_of(given, rule, name, decays=p.dim() >= 2)) for name, p in parameters.items()]
    return optimizer_of(rule, found, fused=fused)


def optimizer_of(rule: Rule, given: Sequence[tuple[Tensor, Setting]], *, fused: bool) -> torch.optim.Optimizer:
    """The same for tensors with settings of their own."""
    kinds: dict[Setting, list[Tensor]] = {}
    for tensor, setting in given:
        kinds.setdefault(setting, []).append(tensor)
    made = [
        {"params": tensors, "weight_decay": kind.decay, "lr": rule.lr * kind.lr, "factor": kind.lr}
        for kind, tensors in kinds.items()
    ]
    if rule.name == "adamw":
        return torch.optim.AdamW(made, lr=rule.lr, betas=betas_of(rule), eps=rule.eps, fused=fused)
    if rule.name == "sgd":
        return torch.optim.SGD(made, lr=rule.lr, momentum=momentum_of(rule), fused=fused)
    raise ValueError(f"torch's optimizers are not ours of this name (optimizer.name={rule.name}); use adamw or sgd")
