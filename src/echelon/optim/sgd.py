"""SGD in plain torch, in chunks, without a word from the host: for split masters, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.optim.rule import Rule, Run

CHUNK = 1 << 20
"""elements at a time, which bounds what is made on the way"""


class PlainSGD:
    """As `torch.optim.SGD`: weight decay is a part of the gradient, and of the momentum."""

    def __init__(self, runs: Sequence[Run], rule: Rule):
        self.rule, self._runs = rule, runs
        self._moments: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        if not self._moments and self.rule.momentum:
            self._moments = [run.zeros(run.unit.master.dtype) for run in self._runs]
        for index, run in enumerate(self._runs):
            moment = self._moments[index] if self._moments else None
            for begin, end, decay in ((0, run.decayed, self.rule.weight_decay), (run.decayed, run.size, 0.0)):
                for start in range(begin, end, CHUNK):
                    self._update(run, moment, slice(start, min(start + CHUNK, end)), lr, decay, scale, live)

    def _update(
        self, run: Run, moment: Tensor | None, part: slice, lr: float, decay: float, scale: Tensor, live: Tensor
    ) -> None:
        before = run.unit.master.values(part)
        towards = run.gradient[part].to(before.dtype) * scale.to(before.dtype) + before * decay
        if moment is not None:
            towards += moment[part] * self.rule.momentum
            moment[part] = torch.where(live, towards, moment[part])
        run.unit.master.set(part.start, torch.where(live, before - towards * lr, before))

    def states(self) -> list[Tensor]:
        return self._moments
