"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    c = beta1 m + (1 - beta1) g                   what the sign is taken of, which is not what is kept
    w = w - lr (sign(c) + decay w)
    m = beta2 m + (1 - beta2) g

One number an element. Every step moves every weight by lr, so lr is a third to a tenth of AdamW's, and weight decay
so much larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_state import Kept, of_runs
from echelon.optim.param_shards import Run
from echelon.optim.update_rule import Rule, betas_of


class Lion:
    def __init__(self, runs: Sequence[Run], rule: Rule):
        self._runs, self._betas = runs, betas_of(rule)
        self._means: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._begin()
        for run, means in zip(self._runs, self._means, strict=True):
            if run.has_kernels:
                self._with_a_kernel(run, means, lr * run.lr, scale, live)
                continue
            for part, decay in run.chunks():
                self._update(run, means[part], part, lr * run.lr, decay, scale, live)

    def _with_a_kernel(self, run: Run, mean: Tensor, lr: float, scale: Tensor, live: Tensor) -> None:
        from echelon.kernels.optim import lion_triton

        lion_triton.update(
            *(*run.weights, mean, run.gradient, scale, live, run.step),
            lr=lr,
            decay=run.decay,
            decayed=run.decayed,
            betas=self._betas,
            place=run.place,
        )

    def _update(
        self, run: Run, mean: Tensor, part: slice, lr: float, decay: float, scale: Tensor, live: Tensor
    ) -> None:
        beta1, beta2 = self._betas
        before = run.values(part)
        g = run.gradient[part].to(before.dtype) * scale.to(before.dtype)
        c = mean * beta1 + g * (1 - beta1)
        after = before - (c.sign() + before * decay) * lr
        run.set(part, torch.where(live, after, before))
        mean.copy_(torch.where(live, mean * beta2 + g * (1 - beta2), mean))

    def _begin(self) -> None:
        if not self._means:
            self._means = [run.zeros() for run in self._runs]

    def kept(self) -> Iterator[Kept]:
        self._begin()
        return of_runs("mean", self._runs, self._means)

    def states(self) -> list[Tensor]:
        return self._means

    def collectives(self) -> list[Collective]:
        return []
