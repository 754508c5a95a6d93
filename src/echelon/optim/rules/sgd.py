"""SGD without a word from the host: for masters that are not one tensor, and on a GPU, where it is a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.param_shards import FlatSegment
from echelon.optim.update_rule import UpdateRule, resolve_momentum


class FusedSGD:
    """As `torch.optim.SGD`: weight decay is a part of the gradient, and of the momentum."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._momentum = segments, resolve_momentum(rule)
        self._momentum_buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for index, run in enumerate(self._segments):
            moment = self._momentum_buffers[index] if self._momentum_buffers else None
            if run.use_triton:
                self._update_triton(run, moment, lr * run.lr_factor, grad_scale, do_update)
                continue
            for part, decay in run.chunks():
                self._update_plain(run, moment, part, lr * run.lr_factor, decay, grad_scale, do_update)

    def _update_triton(self, run: FlatSegment, moment: Tensor | None, lr: float, scale: Tensor, live: Tensor) -> None:
        from echelon.kernels.optim import sgd_triton

        sgd_triton.update(
            *(*run.weights, moment, run.gradient, scale, live, run.step),
            lr=lr,
            weight_decay=run.weight_decay,
            num_decayed=run.num_decayed,
            momentum=self._momentum,
            indices=run.indices,
        )

    def _update_plain(
        self, run: FlatSegment, moment: Tensor | None, part: slice, lr: float, decay: float, scale: Tensor, live: Tensor
    ) -> None:
        before = run.read(part)
        towards = run.gradient[part].to(before.dtype) * scale.to(before.dtype) + before * decay
        if moment is not None:
            towards += moment[part] * self._momentum
            moment[part] = torch.where(live, towards, moment[part])
        run.write(part, torch.where(live, before - towards * lr, before))

    def _init_state(self) -> None:
        if not self._momentum_buffers and self._momentum:
            self._momentum_buffers = [run.zeros() for run in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("momentum", self._segments if self._momentum else (), self._momentum_buffers)

    def states(self) -> list[Tensor]:
        return self._momentum_buffers

    def collectives(self) -> list[Collective]:
        return []
