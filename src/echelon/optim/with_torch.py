"""torch's own optimizer on flat shards: its fused kernels. The host reads scale and skip, which a CPU has at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.optim.rule import Rule, Run, build
from echelon.parallel.flat_unit import FlatUnit


@dataclass
class _Part:
    """A run of one unit that decays, or does not."""

    unit: FlatUnit
    where: slice
    values: Tensor
    seen: Tensor | None = None
    """the unit's gradients, of which `values.grad` is a part"""

    def take_gradient(self) -> Tensor:
        if self.seen is not self.unit.grad:
            self.seen = self.unit.grad
            self.values.grad = self.seen[self.where]
        assert self.values.grad is not None
        return self.values.grad

    def let_go(self) -> None:
        if self.unit.lazy:
            self.seen = self.values.grad = None


class WithTorch:
    """Masters that are one tensor."""

    def __init__(self, runs: Sequence[Run], rule: Rule):
        kinds: tuple[list[_Part], list[_Part]] = ([], [])
        for run in runs:
            for kind, where in zip(kinds, (slice(0, run.decayed), slice(run.decayed, run.size)), strict=True):
                if where.start < where.stop:
                    kind.append(_Part(run.unit, where, run.unit.master.values(where)))
        self._parts = [part for kind in kinds for part in kind]
        decayed, plain = ([part.values for part in kind] for kind in kinds)
        self._inner = build(rule, decayed, plain) if self._parts else None

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        if self._inner is None or not live:
            return
        factor = float(scale)
        for part in self._parts:
            gradient = part.take_gradient()
            if factor != 1.0:
                gradient.mul_(factor)
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        for part in self._parts:
            part.let_go()

    def states(self) -> list[Tensor]:
        state = {} if self._inner is None else self._inner.state
        return [value for values in state.values() for value in values.values() if torch.is_tensor(value)]
