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
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.param_shards import FlatSegment
from echelon.optim.update_rule import UpdateRule, resolve_betas


class Lion:
    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._betas = segments, resolve_betas(rule)
        self._exp_avgs: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for run, means in zip(self._segments, self._exp_avgs, strict=True):
            if run.use_triton:
                self._update_triton(run, means, lr * run.lr_factor, grad_scale, do_update)
                continue
            for part, decay in run.chunks():
                self._update_plain(run, means[part], part, lr * run.lr_factor, decay, grad_scale, do_update)

    def _update_triton(self, run: FlatSegment, mean: Tensor, lr: float, scale: Tensor, live: Tensor) -> None:
        from echelon.kernels.optim import lion_triton

        lion_triton.update(
            *(*run.weights, mean, run.gradient, scale, live, run.step),
            lr=lr,
            weight_decay=run.weight_decay,
            num_decayed=run.num_decayed,
            betas=self._betas,
            indices=run.indices,
        )

    def _update_plain(
        self, run: FlatSegment, mean: Tensor, part: slice, lr: float, decay: float, scale: Tensor, live: Tensor
    ) -> None:
        beta1, beta2 = self._betas
        before = run.read(part)
        g = run.gradient[part].to(before.dtype) * scale.to(before.dtype)
        c = mean * beta1 + g * (1 - beta1)
        after = before - (c.sign() + before * decay) * lr
        run.write(part, torch.where(live, after, before))
        mean.copy_(torch.where(live, mean * beta2 + g * (1 - beta2), mean))

    def _init_state(self) -> None:
        if not self._exp_avgs:
            self._exp_avgs = [run.zeros() for run in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("mean", self._segments, self._exp_avgs)

    def states(self) -> list[Tensor]:
        return self._exp_avgs

    def collectives(self) -> list[Collective]:
        return []
