"""SGD in plain torch, in chunks, without a word from the host: for masters that are not one tensor, and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels.adamw import Place, random_bits, rounded_by_chance, second
from echelon.optim.rule import Rule, Run, runs_of
from echelon.parallel.flat import Flat

CHUNK = 1 << 20
"""elements at a time, which bounds what is made on the way"""


class PlainSGD:
    """As `torch.optim.SGD`: weight decay is a part of the gradient, and of the momentum."""

    def __init__(self, flat: Flat, rule: Rule, seed: int = 0):
        self.rule, self._runs = rule, list(runs_of(flat))
        self._parts = [list(run.parts(flat, seed)) for run in self._runs]
        self._moments: list[Tensor] = []
        self._step: Tensor | None = None
        """of updates, where weights are rounded by chance"""
        if any(run.is_rounded for run in self._runs):
            self._step = torch.zeros((), dtype=torch.int64, device=flat.units[0].full.device)

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        if self._step is not None:
            self._step += live
        if not self._moments and self.rule.momentum:
            self._moments = [run.zeros(_exact(run)) for run in self._runs]
        for index, run in enumerate(self._runs):
            moment = self._moments[index] if self._moments else None
            for part in self._parts[index]:
                middle, end = part.where.start + part.decayed, part.where.stop
                for begin, stop, decay in ((part.where.start, middle, self.rule.weight_decay), (middle, end, 0.0)):
                    for start in range(begin, stop, CHUNK):
                        where = slice(start, min(start + CHUNK, stop))
                        place = part.place.after(start - part.where.start)
                        self._update(run, moment, where, place, lr, decay, scale, live)

    def _update(
        self,
        run: Run,
        moment: Tensor | None,
        part: slice,
        place: Place,
        lr: float,
        decay: float,
        scale: Tensor,
        live: Tensor,
    ) -> None:
        held = run.unit.master.values(part)
        before = held.to(_exact(run))
        towards = run.gradient[part].to(before.dtype) * scale.to(before.dtype) + before * decay
        if moment is not None:
            towards += moment[part] * self.rule.momentum
            moment[part] = torch.where(live, towards, moment[part])
        after = before - towards * lr
        if run.is_rounded and self._step is not None:
            after = rounded_by_chance(after, second(random_bits(len(after), place, self._step)))
        run.unit.master.set(part.start, torch.where(live, after, held))

    def states(self) -> list[Tensor]:
        return self._moments if self._step is None else [self._step, *self._moments]


def _exact(run: Run) -> torch.dtype:
    """The type of the arithmetic."""
    return torch.promote_types(run.unit.master.dtype, torch.float32)
