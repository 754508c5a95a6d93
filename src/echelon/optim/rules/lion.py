"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    c = beta1 m + (1 - beta1) g                   the sign is taken of c; m is the state
    w = w - lr (sign(c) + decay w)
    m = beta2 m + (1 - beta2) g

One state value per element. Every step moves every weight by lr, so lr is a third to a tenth of AdamW's, and weight
decay larger by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.update_rule import UpdateRule, resolve_betas


class Lion(ShardedOptimizer):
    """Lion on flat segments."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._betas = segments, resolve_betas(rule)
        self._exp_avgs: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        beta1, beta2 = self._betas
        for segment, exp_avg in zip(self._segments, self._exp_avgs, strict=True):
            segment_lr = lr * segment.lr_factor
            if segment.use_triton:
                from echelon.kernels.optim.elementwise_updates_triton import lion_update

                tensors = (*segment.weights, exp_avg, segment.gradient, grad_scale, do_update, segment.step)
                lion_update(tensors, lr=segment_lr, betas=self._betas, **segment.kernel_options)
                continue
            for chunk, decay in segment.chunks():
                before, m = segment.read(chunk), exp_avg[chunk]
                g = segment.gradient[chunk].to(before.dtype) * grad_scale.to(before.dtype)
                c = m * beta1 + g * (1 - beta1)
                after = before - (c.sign() + before * decay) * segment_lr
                segment.write(chunk, torch.where(do_update, after, before))
                m.copy_(torch.where(do_update, m * beta2 + g * (1 - beta2), m))

    def _init_state(self) -> None:
        if not self._exp_avgs:
            self._exp_avgs = [segment.zeros() for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("mean", self._segments, self._exp_avgs)

    def states(self) -> list[Tensor]:
        return self._exp_avgs
