"""Where a loss that is not finite began: the first module of the forward pass whose output is not.

By the time a loss is known, what led to it is gone. The step has updated nothing, so its forward pass is made again,
with the same weights, samples and random numbers, and looked at. Where steps are told one later, the step behind it may
have moved the weights; nearly always they lead to the same place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from echelon.parallel.apply import WORLD_AXIS
from echelon.training.batch_sharding import Microbatch
from echelon.training.engine import Engine
from echelon.training.guard.module_outputs import watch_outputs
from echelon.training.guard.nan_debug import NonfiniteOutput
from echelon.training.guard.replay_check import StepSnapshot


def first_nonfinite_output(engine: Engine, microbatches: Iterable[Microbatch]) -> NonfiniteOutput | None:
    """All ranks must ask, for their own microbatches of a step; none where every output is finite."""
    names: list[str] = []
    good: list[Tensor] = []

    def see(name: str, value: Tensor) -> None:
        names.append(name)
        good.append(torch.isfinite(value).all())

    before = StepSnapshot(engine)
    with watch_outputs(engine.model, see):
        engine.forward_only(microbatches)
    before.restore()
    bad = [name for name, fine in zip(names, torch.stack(good).tolist() if good else (), strict=True) if not fine]
    axis, order = engine.parallel.axes[WORLD_AXIS], engine.nonfinite_locator.modules
    told = torch.zeros(axis.size, dtype=torch.int64, device=engine.parallel.options.device)
    told[axis.index] = len(order) - order.index(bad[0]) if bad else 0
    found = axis.all_reduce(told).tolist()
    if not any(found):
        return None
    # Later modules have smaller numbers, and what they give follows from what they are given.
    ranks = tuple(axis.ranks[place] for place, number in enumerate(found) if number == max(found))
    return NonfiniteOutput(order[len(order) - max(found)], ranks)
