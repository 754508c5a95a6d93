"""torch's own optimizer on flat shards: its fused kernels. The host reads scale and skip, which a CPU has at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.optim.rule import Rule, build, runs_of
from echelon.parallel.flat import Flat
from echelon.parallel.flat_unit import FlatUnit


class WithTorch:
    """Masters that are one tensor."""

    def __init__(self, flat: Flat, rule: Rule):
        self._parts: list[tuple[FlatUnit, slice, Tensor]] = []
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for run in runs_of(flat):
            for kind, part in zip(kinds, (slice(0, run.decayed), slice(run.decayed, run.size)), strict=True):
                if part.start < part.stop:
                    values = run.unit.master.values()[part]
                    self._parts.append((run.unit, part, values))
                    kind.append(values)
        self._inner = build(rule, *kinds) if self._parts else None

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        if self._inner is None or not live:
            return
        factor = float(scale)
        for unit, part, values in self._parts:
            values.grad = unit.grad[part]
            if factor != 1.0:
                values.grad.mul_(factor)
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        for _, _, values in self._parts:
            values.grad = None  # the unit's own, which it may free

    def states(self) -> list[Tensor]:
        state = {} if self._inner is None else self._inner.state
        return [value for values in state.values() for value in values.values() if torch.is_tensor(value)]
