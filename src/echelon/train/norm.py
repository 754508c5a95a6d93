"""The gradient norm and clipping by the placement record: every logical element once, in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from echelon.parallel.apply import Parallel
from echelon.parallel.flat_unit import FlatUnit, norm_of

Runs = list[tuple[FlatUnit, slice]]
"""parts of units' shards"""


def owned_runs(parallel: Parallel, *, first: bool = False) -> Runs:
    """The parts of this rank's shards that it alone counts: no padding, no second copy.

    Replicas count each for themselves, or with `first` only the first of them.
    """
    found: Runs = []
    for unit in parallel.flat.units:
        pieces = [
            p
            for u, p in parallel.flat.pieces()
            if u is unit and p.owner and p.entry.trainable and (p.first or not first)
        ]
        runs = [(p.shard_offset + a - p.start, p.shard_offset + b - p.start) for p in pieces for a, b in p.runs()]
        found += [(unit, slice(start, stop)) for start, stop in _joined(sorted(runs))]
    return found


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = stop = -1
    for low, high in runs:
        if low == stop:
            stop = high
            continue
        if stop > start:
            yield start, stop
        start, stop = low, high
    if stop > start:
        yield start, stop


class GradientNorm:
    """Norm over all ranks. Call it after reduction; shards and parts of tp differ, replicas are equal."""

    def __init__(self, parallel: Parallel):
        # Stages of an asynchronous schedule update at different times: each has a norm of its own.
        together = parallel.layout.pp > 1 and not parallel.policy.versions
        # Experts lie on other ranks than the rest: then all ranks of a stage count, and each copy once.
        folded = parallel.folded
        shards = "replica*shard*cp*tp" if folded else f"{parallel.policy.axis}*tp"
        self.axis = parallel.axes.axis(f"pp*{shards}" if together else shards)
        self.runs = owned_runs(parallel, first=folded)
        for unit, part in self.runs:
            unit.norm_runs.append(part)
        self.device = parallel.options.device

    @torch.no_grad()
    def __call__(self, kind: float = 2.0) -> Tensor:
        """A float64 scalar, equal on all ranks, on the device. `kind` is 2 or infinity."""
        local = self._local(self.runs, kind)
        return self.axis.all_reduce(local, op="max") if math.isinf(kind) else self.total(local.square())

    @torch.no_grad()
    def squares(self, unit: FlatUnit) -> Tensor:
        """What one unit adds to the square of the norm on this rank."""
        return self._local([(other, part) for other, part in self.runs if other is unit], 2.0).square()

    def total(self, squares: Tensor) -> Tensor:
        """The norm from all units' squares on this rank, which become the sum over the ranks."""
        return self.axis.all_reduce(squares).sqrt()

    def _local(self, runs: Runs, kind: float) -> Tensor:
        if not runs:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        found = [self._of(unit, part, kind) for unit, part in runs]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(found), kind, dtype=torch.float64)
        return norm

    def _of(self, unit: FlatUnit, part: slice, kind: float) -> Tensor:
        if kind == 2.0 and unit.norms:  # its gradient has left the device
            return unit.norms[part.start]
        return norm_of(unit.grad[part], kind).to(self.device)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What all gradients are multiplied by, so that their norm is at most `limit`; 0 turns clipping off."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
