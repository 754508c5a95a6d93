"""torch's own optimizer on flat shards: its fused kernels. The host reads scale and skip, which a CPU has at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_groups import Setting
from echelon.optim.optimizer_state import Kept, number, of_run
from echelon.optim.param_shards import Run
from echelon.optim.torch_rules import optimizer_of
from echelon.optim.update_rule import Rule, momentum_of
from echelon.parallel.dp.param_group import FlatUnit

NAMES = {"exp_avg": "mean", "exp_avg_sq": "square", "momentum_buffer": "momentum"}
"""torch's names of states, and ours"""


@dataclass
class _Part:
    """A run of one unit that decays, or does not."""

    run: Run
    where: slice
    """in the shard of the unit"""
    setting: Setting
    values: Tensor
    seen: Tensor | None = None
    """the unit's gradients, of which `values.grad` is a part"""

    @property
    def unit(self) -> FlatUnit:
        return self.run.unit

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
        self._parts: list[_Part] = []
        for run in runs:
            for begin, end, decay in ((0, run.decayed, run.decay), (run.decayed, run.size, 0.0)):
                where = slice(run.start + begin, run.start + end)
                if begin < end:
                    values = run.unit.master.values(where)
                    self._parts.append(_Part(run, where, Setting(run.lr, decay), values))
        self._parts.sort(key=lambda part: not part.setting.decay)
        given = [(part.values, part.setting) for part in self._parts]
        self._momentum = momentum_of(rule)
        self._inner = optimizer_of(rule, given, fused=True) if self._parts else None

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
            group["lr"] = lr * group["factor"]
        self._inner.step()
        for part in self._parts:
            part.let_go()

    def _begin(self) -> None:
        """States as torch makes them in its first step."""
        if self._inner is None or self._inner.state:
            return
        for part in self._parts:
            state = self._inner.state[part.values]
            if isinstance(self._inner, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.values.device)
                state["exp_avg"] = torch.zeros_like(part.values)
                state["exp_avg_sq"] = torch.zeros_like(part.values)
            elif self._momentum:
                state["momentum_buffer"] = torch.zeros_like(part.values)

    def kept(self) -> Iterator[Kept]:
        self._begin()
        for part in self._parts if self._inner is not None else ():
            assert self._inner is not None
            state = self._inner.state[part.values]
            for name, kind in NAMES.items():
                if (tensor := state.get(name)) is not None:
                    found = list(of_run(kind, part.run, part.where.start, tensor))
                    yield from found
                    if name == "exp_avg":
                        yield from (number("step", one.unit, one.piece, state["step"]) for one in found)

    def states(self) -> list[Tensor]:
        state = {} if self._inner is None else self._inner.state
        return [value for values in state.values() for value in values.values() if torch.is_tensor(value)]

    def collectives(self) -> list[Collective]:
        return []
