"""`Pipeline`: a layout's schedule, its stages, and the runtime that brings them together on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.layout import Layout, Mesh
from echelon.parallel.apply import Options, apply
from echelon.parallel.axis import world_rank
from echelon.pipeline.actions import Action, Kind
from echelon.pipeline.lower import lower
from echelon.pipeline.runtime import Runtime, Work
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make
from echelon.pipeline.stage import cut


class Pipeline:
    """One rank's part of a pipelined model."""

    def __init__(self, model: nn.Module, layout: Layout, options: Options):
        self.schedule = lower(make(layout.schedule, layout.pp, layout.accumulate, chunks=layout.vpp))
        self.stages = cut(model, self.schedule.homes, options.stage_layers)
        held = self.stages.held(Mesh(layout).coordinates(world_rank())["pp"])
        self.parallel = apply(model, layout, options, held)
        links = [self.stages.links(stage) for stage in range(self.schedule.stages)]
        self.runtime = Runtime(self.parallel, self.stages.chain, links, self.schedule)

    def train(self, works: Sequence[Work], seed: float) -> Tensor:
        """(sum of losses, number of valid targets) of this rank; gradients of the sum times `seed` are reduced."""
        return self.runtime.train(works, seed)

    def evaluate(self, works: Sequence[Work]) -> Tensor:
        return self.runtime.evaluate(works, lower(forwards(self.schedule.homes, len(works))))

    def logits(self, inputs: Mapping[str, Tensor], size: int) -> Tensor:
        """[size]: what the model says comes after the last position of the only row, on every rank."""
        device = self.parallel.options.device
        work = Work(inputs, torch.zeros(1, dtype=torch.int64, device=device))
        found = self.runtime.logits(work, lower(forwards(self.schedule.homes, 1)))
        told = torch.zeros(size, dtype=torch.float64, device=device)
        if found is not None:
            told += found[0, -1, :size]
        return self.parallel.axes["pp"].all_reduce(told)


def forwards(homes: Sequence[int], microbatches: int) -> Schedule:
    """Every forward and nothing else, for evaluation."""
    return Schedule(
        name="forward",
        homes=tuple(homes),
        microbatches=microbatches,
        lists=tuple(
            tuple(
                Action(stage, Kind.FORWARD, m)
                for m in range(microbatches)
                for stage, home in enumerate(homes)
                if home == rank
            )
            for rank in range(max(homes) + 1)
        ),
    )
