"""SGD without host synchronisation: on a GPU, where it is one kernel, and for split master weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.update_rule import UpdateRule, resolve_momentum


class FusedSGD:
    """SGD as `torch.optim.SGD`: weight decay is added to the gradient, before momentum."""

    def __init__(self, segments: Sequence[FlatSegment], rule: UpdateRule):
        self._segments, self._momentum = segments, resolve_momentum(rule)
        self._momentum_buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._init_state()
        for index, segment in enumerate(self._segments):
            momentum_buffer = self._momentum_buffers[index] if self._momentum_buffers else None
            if segment.use_triton:
                self._update_triton(segment, momentum_buffer, lr * segment.lr_factor, grad_scale, do_update)
                continue
            for chunk, decay in segment.chunks():
                self._update_plain(
                    segment, momentum_buffer, chunk, lr * segment.lr_factor, decay, grad_scale, do_update
                )

    def _update_triton(
        self, segment: FlatSegment, momentum_buffer: Tensor | None, lr: float, grad_scale: Tensor, do_update: Tensor
    ) -> None:
        from echelon.kernels.optim.elementwise_updates_triton import sgd_update

        sgd_update(
            (*segment.weights, momentum_buffer, segment.gradient, grad_scale, do_update, segment.step),
            lr=lr,
            weight_decay=segment.weight_decay,
            num_decayed=segment.num_decayed,
            momentum=self._momentum,
            indices=segment.indices,
        )

    def _update_plain(
        self,
        segment: FlatSegment,
        momentum_buffer: Tensor | None,
        chunk: slice,
        lr: float,
        decay: float,
        grad_scale: Tensor,
        do_update: Tensor,
    ) -> None:
        before = segment.read(chunk)
        direction = segment.gradient[chunk].to(before.dtype) * grad_scale.to(before.dtype) + before * decay
        if momentum_buffer is not None:
            direction += momentum_buffer[chunk] * self._momentum
            momentum_buffer[chunk] = torch.where(do_update, direction, momentum_buffer[chunk])
        segment.write(chunk, torch.where(do_update, before - direction * lr, before))

    def _init_state(self) -> None:
        if not self._momentum_buffers and self._momentum:
            self._momentum_buffers = [segment.zeros() for segment in self._segments]

    def named_states(self) -> Iterator[OptimizerState]:
        self._init_state()
        return segment_states("momentum", self._segments if self._momentum else (), self._momentum_buffers)

    def states(self) -> list[Tensor]:
        return self._momentum_buffers

    def collectives(self) -> list[Collective]:
        return []
