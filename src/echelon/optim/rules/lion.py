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

from echelon.layout.collective import Collective
from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.update_rule import UpdateRule, resolve_betas


class Lion:
    """Lion on flat segments."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._betas = segments, resolve_betas(rule)
        self._exp_avgs: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for segment, exp_avg in zip(self._segments, self._exp_avgs, strict=True):
            if segment.use_triton:
                self._update_triton(segment, exp_avg, lr * segment.lr_factor, grad_scale, do_update)
                continue
            for chunk, decay in segment.chunks():
                self._update_plain(segment, exp_avg[chunk], chunk, lr * segment.lr_factor, decay, grad_scale, do_update)

    def _update_triton(
        self, segment: FlatSegment, exp_avg: Tensor, lr: float, grad_scale: Tensor, do_update: Tensor
    ) -> None:
        from echelon.kernels.optim.elementwise_updates_triton import lion_update

        lion_update(
            (*segment.weights, exp_avg, segment.gradient, grad_scale, do_update, segment.step),
            lr=lr,
            weight_decay=segment.weight_decay,
            num_decayed=segment.num_decayed,
            betas=self._betas,
            indices=segment.indices,
        )

    def _update_plain(
        self,
        segment: FlatSegment,
        exp_avg: Tensor,
        chunk: slice,
        lr: float,
        decay: float,
        grad_scale: Tensor,
        do_update: Tensor,
    ) -> None:
        beta1, beta2 = self._betas
        before = segment.read(chunk)
        g = segment.gradient[chunk].to(before.dtype) * grad_scale.to(before.dtype)
        c = exp_avg * beta1 + g * (1 - beta1)
        after = before - (c.sign() + before * decay) * lr
        segment.write(chunk, torch.where(do_update, after, before))
        exp_avg.copy_(torch.where(do_update, exp_avg * beta2 + g * (1 - beta2), exp_avg))

    def _init_state(self) -> None:
        if not self._exp_avgs:
            self._exp_avgs = [segment.zeros() for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("mean", self._segments, self._exp_avgs)

    def states(self) -> list[Tensor]:
        return self._exp_avgs

    def collectives(self) -> list[Collective]:
        return []
