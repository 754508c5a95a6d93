"""An exponential moving average of the weights: average = decay average + (1 - decay) weights, after every update.

It starts as the first weights, is of the master's type (float32 where there is no master), and is sharded as they are:
no message, one number an element.
Evaluation swaps it with the weights, shard by shard, and back: no second copy is made. Weights without a master copy
could not hold it: there evaluation gets it rounded, and the weights lie aside until they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from echelon.optim.optimizer_state import OptimizerState, segment_states
from echelon.optim.param_shards import FlatSegment, uses_stochastic_rounding
from echelon.parallel.dp.param_group import ParamGroup

TRUE = torch.ones((), dtype=torch.bool)


class WeightEMA:
    def __init__(self, segments: Sequence[FlatSegment], decay: float):
        self._segments, self._decay = segments, decay
        self._averages = [run.read(slice(0, run.size)).clone() for run in segments]
        self._saved_weights: dict[int, Tensor] = {}
        self._on_device = []
        for run, average in zip(segments, self._averages, strict=True):
            host = run.param_group.offloaded
            if host is None:
                self._on_device.append((run, average))
            else:
                host.after_update_hooks.append(
                    partial(_update_ema, replace(run, param_group=cast(ParamGroup, host)), average, decay, TRUE)
                )

    @torch.no_grad()
    def step(self, do_update: Tensor) -> None:
        """After an update; where `live` is false there was none."""
        for run, average in self._on_device:
            _update_ema(run, average, self._decay, do_update)

    @torch.no_grad()
    def swap(self) -> None:
        """The weights become the average, and the average the weights."""
        for index, (run, average) in enumerate(zip(self._segments, self._averages, strict=True)):
            if uses_stochastic_rounding(run.param_group):
                self._swap_rounded(index)
                continue
            for part, _ in run.chunks():
                weights = run.read(part).clone()
                run.write(part, average[part])
                average[part] = weights

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
        from echelon.kernels.optim import ema_triton

        ema_triton.update_ema(average, *segment.weights, do_update, 1 - decay)
        return
    for part, _ in segment.chunks():
        mine = average[part]
        towards = (segment.read(part) - mine) * (1 - decay)
        mine.copy_(torch.where(do_update, mine + towards, mine))
