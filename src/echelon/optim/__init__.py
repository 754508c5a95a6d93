"""Update rules on flat shards.

An elementwise rule (AdamW, SGD) does not care which parameter an element belongs to, so it runs on the few long runs
of each unit's shard that share hyperparameters: torch's fused kernels, a handful of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.parallel.flat import Flat

MOMENTS = {"adamw": 2, "sgd": 1}
"""optimizer values per element; SGD without momentum keeps none"""


class Rule(Protocol):
    """What an update rule is made from; `OptimizerConfig` is one."""

    @property
    def name(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def momentum(self) -> float: ...


def build(
    rule: Rule, decayed: Sequence[Tensor], plain: Sequence[Tensor], *, fused: bool = True
) -> torch.optim.Optimizer:
    """torch's optimizer for a rule, with weight decay on the first tensors only."""
    groups = [
        {"params": list(tensors), "weight_decay": decay}
        for tensors, decay in ((decayed, rule.weight_decay), (plain, 0.0))
        if tensors
    ]
    if rule.name == "adamw":
        return torch.optim.AdamW(groups, lr=rule.lr, betas=rule.betas, eps=rule.eps, fused=fused)
    if rule.name == "sgd":
        return torch.optim.SGD(groups, lr=rule.lr, momentum=rule.momentum, fused=fused)
    raise ValueError(f"there is no optimizer of this name (optimizer.name={rule.name}); use adamw or sgd")


def num_moments(rule: Rule) -> int:
    return 0 if rule.name == "sgd" and rule.momentum == 0 else MOMENTS[rule.name]


class ShardedOptimizer:
    """An elementwise rule over all units' shards of one rank."""

    def __init__(self, flat: Flat, rule: Rule):
        self.runs: list[Tensor] = []
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for unit in flat.units:
            shard = flat.placement.at["shard"] if unit.unit.shards > 1 else 0
            for kind, (start, stop) in zip(kinds, unit.unit.decay_ranges(shard), strict=True):
                if start < stop:
                    run = unit.master[start:stop]
                    run.grad = unit.grad[start:stop]
                    kind.append(run)
                    self.runs.append(run)
        # A rank may hold no element at all (fewer elements than ranks); it still takes part in every collective.
        self.inner = build(rule, *kinds) if self.runs else None

    @torch.no_grad()
    def step(self, lr: float, scale: float) -> None:
        """One update with gradients times `scale`; they are left so in their buffers."""
        if self.inner is None:
            return
        for run in self.runs if scale != 1.0 else ():
            assert run.grad is not None
            run.grad.mul_(scale)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()

    def state_bytes(self) -> int:
        """Bytes of moments on this rank, measured."""
        state = {} if self.inner is None else self.inner.state
        return sum(
            t.numel() * t.element_size()
            for values in state.values()
            for t in values.values()
            if torch.is_tensor(t) and t.dim()
        )
