"""The gradient norm and clipping by the placement record: every logical element once, in every layout.

[Note: which gradient is not finite]

The norm is made of the norms of the parameters, in one pass over all gradients. Those stay on the device, and are read
only when the norm is not finite: then they tell whose gradient it was. What a rank holds and does not count, such as
its copy of a weight that another rank counts, is looked at all the same, and makes the norm not finite everywhere: a
rank never updates alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from echelon import compat
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.param_group import FlatUnit, norm_of


@dataclass(frozen=True)
class Part:
    """A run of one parameter's elements in a unit's shard, without padding."""

    unit: FlatUnit
    where: slice
    name: str
    """of the parameter"""
    counted: bool
    """by this rank: exactly one rank of each replica counts an element"""


def parts_of(parallel: Parallel, *, first: bool = False) -> list[Part]:
    """All trainable elements of this rank. Replicas count each for themselves, or with `first` the first alone."""
    return [
        Part(unit, slice(p.shard_offset + a - p.start, p.shard_offset + b - p.start), p.entry.name, counted)
        for unit, p in parallel.flat.pieces()
        if p.entry.trainable
        for counted in (p.owner and (p.first or not first),)
        for a, b in p.runs()
    ]


class GradientNorm:
    """Norm over all ranks. Call it after reduction; shards and parts of tp differ, replicas are equal."""

    def __init__(self, parallel: Parallel):
        # Stages of an asynchronous schedule update at different times: each has a norm of its own.
        together = parallel.layout.pp > 1 and not parallel.policy.versions
        # Experts lie on other ranks than the rest: then all ranks of a stage count, and each copy once.
        folded = parallel.folded
        shards = "replica*shard*cp*tp" if folded else f"{parallel.policy.axis}*tp"
        self.axis = parallel.axes.axis(f"pp*{shards}" if together else shards)
        found = parts_of(parallel, first=folded)
        # Of one kind after the other, as they are computed; what is counted comes first.
        order = sorted(found, key=lambda part: (not part.counted, str(_kind(part))))
        self.parts, self._counted = order, sum(part.counted for part in order)
        for part in order:
            part.unit.norm_runs.append(part.where)
        self.device = parallel.options.device

    @torch.no_grad()
    def __call__(self, kind: float = 2.0) -> Tensor:
        """A float64 scalar, equal on all ranks, on the device. `kind` is 2 or infinity."""
        return self.measured(kind)[0]

    @torch.no_grad()
    def measured(self, kind: float = 2.0) -> tuple[Tensor, Tensor]:
        """The norm, and those of `parts` (float64) on this rank alone."""
        each = self._norms(self.parts, kind)
        return self.of_all(each, kind), each

    @torch.no_grad()
    def of_unit(self, unit: FlatUnit, each: Tensor) -> None:
        """Writes the norms of one unit's parts to their places among all of this rank's."""
        places = [place for place, part in enumerate(self.parts) if part.unit is unit]
        for place, norm in zip(places, self._norms([self.parts[place] for place in places], 2.0), strict=True):
            each[place] = norm

    def of_all(self, each: Tensor, kind: float = 2.0) -> Tensor:
        """The norm over all ranks from those of this rank's parts."""
        local = torch.linalg.vector_norm(each[: self._counted], kind) if self._counted else each.new_zeros(())
        if self._counted < len(each):
            local = local + (each[self._counted :] * 0.0).sum()  # not a number where one is not finite
        if math.isinf(kind):
            return self.axis.all_reduce(local, op="max")
        return self.axis.all_reduce(local.square()).sqrt()

    def _norms(self, parts: Sequence[Part], kind: float) -> Tensor:
        """Short types are summed in float32 as they are read: no copy of them is made."""
        found: list[Tensor] = []
        for (dtype, away), alike in groupby(parts, key=_kind):
            if away or self.device.type == "cpu":
                found += [self._one(part, kind) for part in alike]
            else:
                slices = [part.unit.grad[part.where] for part in alike]
                found += compat.norms(slices, kind, torch.promote_types(dtype, torch.float32))
        return torch.stack(found).double() if found else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _one(self, part: Part, kind: float) -> Tensor:
        """Of gradients on the host, those that left early have told it before."""
        if kind == 2.0 and part.unit.norms:
            return part.unit.norms[part.where.start]
        return norm_of(part.unit.grad[part.where], kind).to(self.device)


def _kind(part: Part) -> tuple[torch.dtype, bool]:
    """What is computed at once: of one type, on one device."""
    return part.unit.gradient_type, part.unit.host is not None


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What all gradients are multiplied by, so that their norm is at most `limit`; 0 turns clipping off."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
