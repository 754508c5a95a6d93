"""What an update rule is made of, and what an update is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echelon import rng
from echelon.kernels.adamw import MASK, Place
from echelon.layout.placement import Piece
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

    @property
    def is_rounded(self) -> bool:
        """Its weights have no master: they are rounded by chance."""
        return self.unit.master.dtype == torch.bfloat16

    def parts(self, flat: Flat, seed: int) -> Iterator[Part]:
        """All of it, or parameter by parameter where every layout must round alike."""
        if not self.is_rounded:
            yield Part(slice(0, self.size), self.decayed, Place(self.first))
            return
        for entry in self.unit.unit.entries:
            piece = flat.placement.piece(self.unit.unit, entry)
            size = piece.stop - piece.start
            if entry.trainable and size:
                where = slice(piece.shard_offset, piece.shard_offset + size)
                yield Part(where, size if entry.decay else 0, place_of(piece, seed))

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A state of its elements."""
        return torch.zeros(self.size, dtype=dtype, device=self.unit.full.device)


@dataclass(frozen=True)
class Part:
    """Elements of a run that are updated at a time."""

    where: slice
    decayed: int
    place: Place


def place_of(piece: Piece, seed: int) -> Place:
    """Where a piece lies in its whole parameter, for random numbers."""
    entry = piece.entry
    dims = [(1, 1, 0)] * 3 + [
        (local, whole, low) for local, whole, (low, _) in zip(entry.local_shape, entry.shape, piece.box, strict=True)
    ]
    index = len(dims) - 1
    while index > 0 and len(dims) > 3:  # a dim that is whole is a part of the one before it
        (local, whole, low), (inner, size, _) = dims[index - 1], dims[index]
        if inner == size:
            dims[index - 1 : index + 1] = [(local * inner, whole * size, low * size)]
        index -= 1
    assert len(dims) == 3, "at most two dims of a parameter are cut"
    (_, _, outer), (middle, rows, low), (inner, columns, first) = dims
    key = rng.key(seed, f"rounding {entry.name}") & MASK
    return Place(
        start=piece.start,
        key=key,
        sizes=(middle, inner),
        strides=(rows * columns, columns),
        base=(outer * rows + low) * columns + first,
    )


def runs_of(flat: Flat) -> Iterator[Run]:
    """A rank may hold no element at all (fewer elements than ranks); it still takes part in every collective."""
    first = 0
    for unit in flat.units:
        shard = flat.placement.shard_of(unit.unit)
        (_, decayed), (_, size) = unit.unit.decay_ranges(shard)
        if size:
            yield Run(unit, decayed, size, first + shard * unit.unit.shard_numel)
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
    """Of one moment of one element: at least of float32, whatever the weights are."""
    return 2 if rule.states == "bfloat16" else max(master.itemsize, 4)
