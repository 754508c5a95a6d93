"""AdamW in one pass over each unit's shard (kernels/optim/fused_adamw.py): a kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.layout.collective import Collective
from echelon.optim.optimizer_state import Kept, number_of_runs, of_runs
from echelon.optim.param_shards import Run, exact
from echelon.optim.update_rule import Rule, betas_of


class OnePassAdamW:
    """The number of steps is on the device: a step without a target does not count, and nobody waits to know."""

    def __init__(self, runs: Sequence[Run], rule: Rule, device: torch.device):
        self.rule, self._runs, self._device = rule, runs, device
        self._dtype = exact(runs[0].unit) if runs else torch.float32
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._constants = torch.tensor([*betas_of(rule), rule.eps], dtype=torch.float64, device=device)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._step += live
        kinds = dict.fromkeys((run.lr, run.decay) for run in self._runs)
        numbers = {
            kind: fused_adamw.numbers_of(self._constants, lr * kind[0], kind[1], self._step, scale, live, self._dtype)
            for kind in kinds
        }
        self._begin()
        update = update_on(self._device, self._dtype)
        for run, (mean, square) in zip(self._runs, self._moments, strict=True):
            high, low = run.weights
            given = numbers[run.lr, run.decay]
            update(high, low, mean, square, run.gradient, given, self._step, decayed=run.decayed, place=run.place)

    def _begin(self) -> None:
        if not self._moments:
            kind = torch.bfloat16 if self.rule.states == "bfloat16" else self._dtype
            self._moments = [(run.zeros(kind), run.zeros(kind)) for run in self._runs]

    def kept(self) -> Iterator[Kept]:
        self._begin()
        yield from number_of_runs("step", self._runs, self._step)
        yield from of_runs("mean", self._runs, [mean for mean, _ in self._moments])
        yield from of_runs("square", self._runs, [square for _, square in self._moments])

    def states(self) -> list[Tensor]:
        return [self._step, *(moment for pair in self._moments for moment in pair)]

    def collectives(self) -> list[Collective]:
        return []


def update_on(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel on a GPU with Triton's compiler, plain torch elsewhere."""
    if dispatch.updates(device, dtype):
        from echelon.kernels.optim.fused_adamw_triton import update

        return update
    return fused_adamw.update
