"""Exponential moving average of the weights: average = decay average + (1 - decay) weights, after every update.

It starts as the initial weights, has the dtype of the master weights (float32 without them), and is sharded as they
are: no collective, one value per element. Evaluation swaps it with the weights, shard by shard, and back, without a
second copy. bfloat16 weights without master weights cannot hold it: evaluation gets it rounded, and the weights are
saved until they are swapped back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from echelon.optim.flat_segments import FlatSegment
from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.param_shards import uses_stochastic_rounding
from echelon.parallel.dp.param_group import ParamGroup

TRUE = torch.ones((), dtype=torch.bool)


class WeightEMA:
    """The average of a rank's shards; of offloaded groups it is updated on the host."""

    def __init__(self, segments: Sequence[FlatSegment], decay: float):
        self._segments, self._decay = segments, decay
        self._averages = [segment.read(slice(0, segment.size)).clone() for segment in segments]
        self._saved_weights: dict[int, Tensor] = {}
        self._on_device = []
        for segment, average in zip(segments, self._averages, strict=True):
            offloaded = segment.param_group.offloaded
            if offloaded is None:
                self._on_device.append((segment, average))
            else:
                host_segment = replace(segment, param_group=cast(ParamGroup, offloaded))
                offloaded.after_update_hooks.append(partial(_update_ema, host_segment, average, decay, TRUE))

    @torch.no_grad()
    def step(self, do_update: Tensor) -> None:
        """Update the average after an optimizer step; where `do_update` is false there was none."""
        for segment, average in self._on_device:
            _update_ema(segment, average, self._decay, do_update)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and the average."""
        for index, (segment, average) in enumerate(zip(self._segments, self._averages, strict=True)):
            if uses_stochastic_rounding(segment.param_group):
                self._swap_rounded(index)
                continue
            for chunk, _ in segment.chunks():
                weights = segment.read(chunk).clone()
                segment.write(chunk, average[chunk])
                average[chunk] = weights

    def _swap_rounded(self, index: int) -> None:
        master, where = self._segments[index].param_group.master, self._segments[index].shard_slice
        weights = self._saved_weights.pop(index, None)
        if weights is None:
            self._saved_weights[index] = master.values(where).clone()
        master.set_values(where.start, self._averages[index] if weights is None else weights)

    def named_states(self) -> Iterator[OptimizerState]:
        return segment_states("average", self._segments, self._averages)

    def states(self) -> list[Tensor]:
        return self._averages


@torch.no_grad()
def _update_ema(segment: FlatSegment, average: Tensor, decay: float, do_update: Tensor) -> None:
    if segment.use_triton:
        from echelon.kernels.optim.elementwise_updates_triton import update_ema

        update_ema(average, *segment.weights, do_update, 1 - decay)
        return
    for chunk, _ in segment.chunks():
        current = average[chunk]
        direction = (segment.read(chunk) - current) * (1 - decay)
        current.copy_(torch.where(do_update, current + direction, current))
