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

from echelon.optim.optimizer_state import Kept, of_runs
from echelon.optim.param_shards import Run, is_rounded
from echelon.parallel.dp.param_group import FlatUnit

YES = torch.ones((), dtype=torch.bool)


class Average:
    def __init__(self, runs: Sequence[Run], decay: float):
        self._runs, self._decay = runs, decay
        self._values = [run.values(slice(0, run.size)).clone() for run in runs]
        self._aside: dict[int, Tensor] = {}
        self._here = []
        for run, average in zip(runs, self._values, strict=True):
            host = run.unit.host
            if host is None:
                self._here.append((run, average))
            else:
                host.followers.append(partial(_towards, replace(run, unit=cast(FlatUnit, host)), average, decay, YES))

    @torch.no_grad()
    def step(self, live: Tensor) -> None:
        """After an update; where `live` is false there was none."""
        for run, average in self._here:
            _towards(run, average, self._decay, live)

    @torch.no_grad()
    def swap(self) -> None:
        """The weights become the average, and the average the weights."""
        for index, (run, average) in enumerate(zip(self._runs, self._values, strict=True)):
            if is_rounded(run.unit):
                self._lay_aside(index)
                continue
            for part, _ in run.chunks():
                weights = run.values(part).clone()
                run.set(part, average[part])
                average[part] = weights

    def _lay_aside(self, index: int) -> None:
        master, where = self._runs[index].unit.master, self._runs[index].where
        weights = self._aside.pop(index, None)
        if weights is None:
            self._aside[index] = master.values(where).clone()
        master.set(where.start, self._values[index] if weights is None else weights)

    def kept(self) -> Iterator[Kept]:
        return of_runs("average", self._runs, self._values)

    def states(self) -> list[Tensor]:
        return self._values


@torch.no_grad()
def _towards(run: Run, average: Tensor, decay: float, live: Tensor) -> None:
    if run.has_kernels:
        from echelon.kernels.optim import ema_triton

        ema_triton.towards(average, *run.weights, live, 1 - decay)
        return
    for part, _ in run.chunks():
        mine = average[part]
        towards = (run.values(part) - mine) * (1 - decay)
        mine.copy_(torch.where(live, mine + towards, mine))
