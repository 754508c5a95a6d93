"""SGD without a word from the host: for masters that are not one tensor, and on a GPU, where it is a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_state import Kept, of_runs
from echelon.optim.param_shards import Run
from echelon.optim.update_rule import Rule, momentum_of


class PlainSGD:
    """As `torch.optim.SGD`: weight decay is a part of the gradient, and of the momentum."""

    def __init__(self, runs: Sequence[Run], rule: Rule):
        self._runs, self._momentum = runs, momentum_of(rule)
        self._moments: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        for index, run in enumerate(self._runs):
            moment = self._moments[index] if self._moments else None
            if run.has_kernels:
                self._with_a_kernel(run, moment, lr * run.lr, scale, live)
                continue
            for part, decay in run.chunks():
                self._update(run, moment, part, lr * run.lr, decay, scale, live)

    def _with_a_kernel(self, run: Run, moment: Tensor | None, lr: float, scale: Tensor, live: Tensor) -> None:
        from echelon.kernels.optim import sgd_triton

        sgd_triton.update(
            *(*run.weights, moment, run.gradient, scale, live, run.step),
            lr=lr,
            decay=run.decay,
            decayed=run.decayed,
            momentum=self._momentum,
            place=run.place,
        )

    def _update(
        self, run: Run, moment: Tensor | None, part: slice, lr: float, decay: float, scale: Tensor, live: Tensor
    ) -> None:
        before = run.values(part)
        towards = run.gradient[part].to(before.dtype) * scale.to(before.dtype) + before * decay
        if moment is not None:
            towards += moment[part] * self._momentum
            moment[part] = torch.where(live, towards, moment[part])
        run.set(part, torch.where(live, before - towards * lr, before))

    def _begin(self) -> None:
        if not self._moments and self._momentum:
            self._moments = [run.zeros() for run in self._runs]

    def kept(self) -> Iterator[Kept]:
        self._begin()
        return of_runs("momentum", self._runs if self._momentum else (), self._moments)

    def states(self) -> list[Tensor]:
        return self._moments

    def collectives(self) -> list[Collective]:
        return []
