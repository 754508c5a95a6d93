"""One step of forward and backward over all microbatches: our runtime, and torch's own pipelining schedules.

Both sides hold the same model, cut at the same places by `stage.cut`, with the same links in every stage, and start
backward from 1 / (number of targets). Neither has an optimizer: weights stay as they are, and what is left of a step is
what a pipeline does. Both say the loss on every rank by one all-reduce.

Flags of the peer, each of which makes it faster or costs it nothing: outputs are not returned (torch would put the
logits together), `scale_grads=False` (the loss is divided, so gradients need no pass), gradients are set to None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from model import CONFIG, RULE, SEED, Batch
from peers import Step
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from echelon import models
from echelon.layout import Layout
from echelon.models.layers import loss_sum
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline.execution.runtime import MicrobatchInputs
from echelon.pipeline.execution.stage_assignment import PipelineStages, cut_into_stages
from echelon.pipeline.schedules import schedule_for_layout
from echelon.training.engine import Engine

PEERS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
"""torch's schedule of each of ours"""

GRADIENT_TOLERANCE = 1e-5
"""max|a-b| / max|b| of every parameter, in fp32: the order of additions differs"""


def sides(layout: Layout) -> tuple[Step, Step]:
    """Both steps, after one of each whose gradients were found equal."""
    ours, peer = Ours(layout), Peer(layout)
    text = torch.randint(
        CONFIG.vocab, (layout.batch, CONFIG.max_seq_len + 1), generator=torch.Generator().manual_seed(SEED)
    )
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    ours(batch)
    peer(batch)
    check(ours.gradients(), peer.gradients())
    return ours, peer


def check(ours: dict[str, Tensor], peers: dict[str, Tensor]) -> None:
    if ours.keys() != peers.keys():
        raise ValueError(f"the sides hold different parameters ({sorted(ours.keys() ^ peers.keys())})")
    for name, truth in peers.items():
        error = float((ours[name] - truth).abs().max() / truth.abs().max())
        if not error <= GRADIENT_TOLERANCE:
            raise ValueError(f"the sides differ in the gradient of {name} ({error:.1e} of its largest element)")


def everywhere(loss: Tensor) -> float:
    """The loss of the rank that has the last stage, on all ranks."""
    dist.all_reduce(loss)
    return float(loss)


class Ours:
    """`Runtime.train`, as the engine calls it."""

    def __init__(self, layout: Layout):
        self.engine = Engine(models.build(CONFIG, "meta"), layout, RULE, options=ParallelOptions(seed=SEED))

    def __call__(self, batch: Batch) -> float:
        engine, count = self.engine, batch["targets"].numel()
        assert engine.pipeline is not None
        works = [MicrobatchInputs(m.inputs, m.samples) for m in engine.microbatches(batch)]
        totals = engine.pipeline.runtime.train(works, 1.0 / count)
        return everywhere(totals[0] / count)

    def gradients(self) -> dict[str, Tensor]:
        flat = self.engine.parallel.sharded_model
        return {
            piece.param.name: flat.piece_view(unit.grad, piece).view(piece.param.shape) for unit, piece in flat.pieces()
        }


class Peer:
    """torch's schedule over `PipelineStage`s."""

    def __init__(self, layout: Layout):
        self.model = models.build(CONFIG, seed=SEED)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        homes = schedule_for_layout(layout).rank_of_stage
        stages = cut_into_stages(self.model, homes)
        mine = [stage for stage, home in enumerate(homes) if home == rank]
        parts = [
            PipelineStage(part(self.model, stages, stage), stage, len(homes), torch.device("cpu")) for stage in mine
        ]
        self.is_first, self.is_last = 0 in mine, len(homes) - 1 in mine
        self.used = [name for name, _ in self.model.named_parameters() if any(holds(stages, s, name) for s in mine)]
        self.count = layout.batch * CONFIG.max_seq_len
        chosen = PEERS[layout.schedule]
        self.schedule = chosen(
            parts[0] if len(homes) == ranks else parts, layout.accumulate, loss_fn=self.loss, scale_grads=False
        )

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(logits, targets)[0] / self.count

    def __call__(self, batch: Batch) -> float:
        self.model.zero_grad()
        inputs = (batch["tokens"],) if self.is_first else ()
        losses: list[Tensor] = []
        self.schedule.step(
            *inputs,
            target=batch["targets"] if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        return everywhere(
            torch.stack(losses).detach().sum().double() if losses else torch.zeros((), dtype=torch.double)
        )

    def gradients(self) -> dict[str, Tensor]:
        found = {name: self.model.get_parameter(name).grad for name in self.used}
        return {name: gradient for name, gradient in found.items() if gradient is not None}


def holds(stages: PipelineStages, stage: int, parameter: str) -> bool:
    return any(parameter.startswith(f"{name}.") for link in stages.layers(stage) for name in link.modules)


def part(model: nn.Module, stages: PipelineStages, stage: int) -> nn.Module:
    names = [name for link in stages.layers(stage) for name in link.modules]
    last = stage == len(stages.split.layers) - 1
    return Part(stages.pipeline_model, stages.layers(stage), [model.get_submodule(name) for name in names], last=last)


class Part(nn.Module):
    """A stage as torch wants it: a module from what the stage before gave (the tokens) to what the next one takes."""

    def __init__(
        self, chain: PipelineModel, links: Sequence[PipelineLayer], modules: Sequence[nn.Module], *, last: bool
    ):
        super().__init__()
        self.held = nn.ModuleList(modules)
        self.chain, self.links, self.last = chain, links, last

    def forward(self, x: Tensor) -> Tensor:
        # Positions depend on the length alone, so any stage can make them of what it was given.
        shared = self.chain.shared(tokens=x)
        for link in self.links[:-1] if self.last else self.links:
            x = link.run(x, shared, tokens=x)
        if self.last:
            assert self.chain.logits is not None
            x = self.chain.logits(x, shared)
        return x
