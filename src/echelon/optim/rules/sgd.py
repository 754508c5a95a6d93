"""SGD without host synchronisation: on a GPU, where it is one kernel, and for split master weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.update_rule import UpdateRule, resolve_momentum


class FusedSGD(ShardedOptimizer):
    """SGD as `torch.optim.SGD`: weight decay is added to the gradient, before momentum."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._momentum = segments, resolve_momentum(rule)
        self._momentum_buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for index, segment in enumerate(self._segments):
            moment = self._momentum_buffers[index] if self._momentum_buffers else None
            segment_lr = lr * segment.lr_factor
            if segment.use_triton:
                from echelon.kernels.optim.elementwise_updates_triton import sgd_update

                tensors = (*segment.weights, moment, segment.gradient, grad_scale, do_update, segment.step)
                sgd_update(tensors, lr=segment_lr, momentum=self._momentum, **segment.kernel_options)
                continue
            for chunk, decay in segment.chunks():
                before = segment.read(chunk)
                direction = segment.gradient[chunk].to(before.dtype) * grad_scale.to(before.dtype) + before * decay
                if moment is not None:
                    direction += moment[chunk] * self._momentum
                    moment[chunk] = torch.where(do_update, direction, moment[chunk])
                segment.write(chunk, torch.where(do_update, before - direction * segment_lr, before))

    def _init_state(self) -> None:
        if not self._momentum_buffers and self._momentum:
            self._momentum_buffers = [segment.zeros() for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("momentum", self._segments if self._momentum else (), self._momentum_buffers)

    def states(self) -> list[Tensor]:
        return self._momentum_buffers
