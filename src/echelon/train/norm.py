"""The gradient norm and clipping by the placement record: every logical element once, in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from echelon.parallel.apply import Parallel


def owned_runs(parallel: Parallel) -> list[Tensor]:
    """Views of this rank's reduced gradients that it alone counts: no padding, no second copy."""
    found: list[Tensor] = []
    for unit in parallel.flat.units:
        pieces = [p for u, p in parallel.flat.pieces() if u is unit and p.owner and p.entry.trainable]
        runs = [(p.shard_offset + a - p.start, p.shard_offset + b - p.start) for p in pieces for a, b in p.runs()]
        found += [unit.grad[start:stop] for start, stop in _joined(sorted(runs))]
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
    """Norm over all ranks. Call it after reduction; shards differ over `shard` and `tp`, replicas are equal."""

    def __init__(self, parallel: Parallel):
        # Stages of an asynchronous schedule update at different times: each has a norm of its own.
        together = parallel.layout.pp > 1 and not parallel.policy.versions
        self.axis = parallel.axes["pp*shard*tp" if together else "shard*tp"]
        self.runs = owned_runs(parallel)
        self.device = parallel.options.device

    @torch.no_grad()
    def __call__(self, kind: float = 2.0) -> Tensor:
        """A float64 scalar, equal on all ranks. `kind` is 2 or infinity."""
        local = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.runs:
            local = torch.nn.utils.get_total_norm(self.runs, kind).to(torch.float64)
        if math.isinf(kind):
            return self.axis.all_reduce(local, op="max")
        return self.axis.all_reduce(local.square()).sqrt()


def clip_factor(norm: float, limit: float) -> float:
    """What all gradients are multiplied by, so that their norm is at most `limit`; 0 turns clipping off."""
    return min(limit / (norm + 1e-6), 1.0) if limit else 1.0
