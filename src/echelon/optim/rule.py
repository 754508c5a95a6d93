"""What an update rule is made of, and what an update is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon.parallel.flat import Flat
from echelon.parallel.flat_unit import FlatUnit

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
    @property
    def states(self) -> str: ...


class Update(Protocol):
    """A rule over all units' shards of one rank."""

    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        """One update with gradients times `scale` (float64); none at all, of nothing, where `live` is false.

        Both are on the device, and stay there where the device is a GPU. Gradients may be left multiplied by `scale`.
        """
        ...

    def states(self) -> list[Tensor]:
        """Everything that is kept from step to step, counts of steps too."""
        ...


@dataclass(frozen=True)
class Run:
    """The trainable elements of a unit's shard: they come first, and of them those that decay."""

    unit: FlatUnit
    decayed: int
    size: int
    first: int
    """number of the first element, over all units"""

    @property
    def gradient(self) -> Tensor:
        return self.unit.grad[: self.size]

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A state of its elements."""
        return torch.zeros(self.size, dtype=dtype, device=self.unit.full.device)


def runs_of(flat: Flat, units: Sequence[FlatUnit] | None = None) -> Iterator[Run]:
    """Of all units, or of some.

    A rank may hold no element at all (fewer elements than ranks); it still takes part in every collective.
    """
    first = 0
    chosen = {unit.unit.name: unit for unit in (flat.units if units is None else units)}
    for unit in flat.units:
        shard = flat.placement.shard_of(unit.unit)
        (_, decayed), (_, size) = unit.unit.decay_ranges(shard)
        if size and unit.unit.name in chosen:
            yield Run(chosen[unit.unit.name], decayed, size, first + shard * unit.unit.shard_numel)
        first += unit.unit.numel


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


def moment_bytes(rule: Rule, master: torch.dtype) -> int:
    """Of one moment of one element."""
    return 2 if rule.states == "bfloat16" else master.itemsize
