"""AdamW in one pass over each unit's shard (kernels/adamw.py): a kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.kernels import adamw, choice
from echelon.optim.rule import Rule, Run, runs_of
from echelon.parallel.flat import Flat
from echelon.parallel.master import SplitMaster


class OnePassAdamW:
    """The number of steps is on the device: a step without a target does not count, and nobody waits to know."""

    def __init__(self, flat: Flat, rule: Rule, seed: int = 0):
        self.rule, self._runs = rule, list(runs_of(flat))
        self._parts = [list(run.parts(flat, seed)) for run in self._runs]
        device = flat.units[0].full.device
        self._dtype = torch.promote_types(flat.units[0].master.dtype, torch.float32)
        self._device = device
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._constants = torch.tensor([*rule.betas, rule.eps], dtype=torch.float64, device=device)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._step += live
        decay = self.rule.weight_decay
        numbers = adamw.numbers_of(self._constants, lr, decay, self._step, scale, live, self._dtype)
        if not self._moments:
            kind = torch.bfloat16 if self.rule.states == "bfloat16" else self._dtype
            self._moments = [(run.zeros(kind), run.zeros(kind)) for run in self._runs]
        update = update_on(self._device, self._dtype)
        for run, parts, (mean, square) in zip(self._runs, self._parts, self._moments, strict=True):
            high, low = _weights(run)
            for part in parts:
                where = part.where
                update(
                    high[where],
                    None if low is None else low[where],
                    mean[where],
                    square[where],
                    run.gradient[where],
                    numbers,
                    self._step,
                    decayed=part.decayed,
                    place=part.place,
                )

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments for moment in pair)]


def update_on(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel on a GPU with Triton's compiler, plain torch elsewhere."""
    if device.type == "cuda" and dtype == torch.float32 and choice.allowed():
        from echelon.kernels.adamw_gpu import update

        return update
    return adamw.update


def _weights(run: Run) -> tuple[Tensor, Tensor | None]:
    """The weights, or their two halves."""
    master = run.unit.master
    if isinstance(master, SplitMaster):
        return master.high[: run.size], master.low[: run.size]
    return master.tensor[: run.size], None
