"""`Pipeline`: one rank's stages of a model, and the runtime that executes their schedule.

The engine lays the model out between the two halves of building a pipeline:

    assignment = assign_stages(model, layout, options)              schedule, layers of each stage, modules of each rank
    parallel = apply(model, layout, options, assignment.modules)    the model, laid out on this rank
    pipeline = Pipeline(assignment, parallel)                       the runtime that the schedule's family names
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp.cost import TransformerSizes
from echelon.pipeline.actions import SENDS, Action, ActionKind
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.execution.stage_assignment import StageAssignment
from echelon.pipeline.execution.timeline_recording import planned_and_measured
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import runtime_path, updates_per_step, weight_versions
from echelon.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from echelon.pipeline.async_.async_runtime import AsyncRuntime


class Pipeline:
    """One rank's part of a pipelined model."""

    def __init__(self, assignment: StageAssignment, parallel: ParallelModel):
        self.schedule, self.stages, self.parallel = assignment.schedule, assignment.stages, parallel
        layout = parallel.layout
        self.asynchronous = layout.schedule in ASYNC_SCHEDULES
        self.updates_per_step = updates_per_step(layout)
        self._gathers = parallel.axes.recorder.new_sequence(range(layout.world))
        module, _, name = runtime_path(layout.schedule).rpartition(".")
        runtime_class: type[PipelineRuntime] = getattr(import_module(module), name)
        self.runtime = runtime_class(parallel, assignment)

    # -- cost ---------------------------------------------------------------------------------------------------------

    @property
    def num_weight_versions(self) -> int:
        """The most versions of its weights that this rank holds at once."""
        return weight_versions(self.parallel.layout)[self.runtime.rank]

    @property
    def stages_per_param_group(self) -> dict[str, int]:
        """How many of this rank's stages use each parameter group."""
        sharded = self.parallel.sharded_model
        groups, stages = sharded.param_groups, sharded.stage_groups
        return {group.spec.name: sum(group in of_stage for of_stage in stages) for group in groups}

    def rank_share(self, sizes: TransformerSizes) -> TransformerSizes:
        """A transformer's sizes on this rank alone."""
        stages, last = self.schedule.stages_on(self.runtime.rank), self.schedule.stages - 1
        layers = sum(len(self.stages.split.layers[stage]) for stage in stages)
        has_embedding, has_head = 0 in stages, last in stages
        return replace(sizes, layers=layers - has_embedding - has_head, has_embedding=has_embedding, has_head=has_head)

    def p2p_collectives(self, sizes: TransformerSizes) -> list[Collective]:
        """What this rank of a transformer sends to other stages in a step."""
        layout, slices = self.parallel.layout, self.runtime.slice_lengths(sizes.seq_len)
        actions = self.runtime.schedule_for(sizes.seq_len).rank_actions[self.runtime.rank]
        actions = tuple(action for action in actions if action.kind in SENDS)
        sends = Counter(action.slice_index for action in actions)
        sequences, width = tp_cost.local_activation_shape(layout, sizes.batch, sizes.width)

        def send(size: int, count: int, purpose: str) -> Collective:
            return Collective(op="send", axis="pp", bytes=size, count=count, overlapped=True, purpose=purpose)

        collectives = []
        for index, count in sorted(sends.items()):
            length = slices[index] if slices else sizes.seq_len
            positions = -(-length // layout.tp) if layout.sp else length
            collectives.append(send(sequences * positions * width * sizes.element_bytes, count, "activations"))
        with_losses = sum(self._carries_balance_losses(action, sizes) for action in actions)
        return [*collectives, send(sizes.batch * sizes.loss_bytes, with_losses, "balance losses")]

    def _carries_balance_losses(self, action: Action, sizes: TransformerSizes) -> bool:
        """Whether an MoE layer lies before the boundary that the transfer crosses."""
        stages = action.stage + (action.kind is ActionKind.SEND_FORWARD)
        layers = sum(len(self.stages.split.layers[stage]) for stage in range(stages)) - 1  # the first is the embedding
        return sizes.first_moe_layer is not None and layers > sizes.first_moe_layer

    # -- one step -----------------------------------------------------------------------------------------------------

    @property
    def async_runtime(self) -> AsyncRuntime:
        assert self.asynchronous
        return cast("AsyncRuntime", self.runtime)

    def start_recording(self) -> None:
        """Record the actions of the next step."""
        self.runtime.spans = []

    def finish_recording(self) -> tuple[Timeline, Timeline] | None:
        """Stop recording; (planned, measured) timelines of the recorded step, on every rank."""
        spans, self.runtime.spans = self.runtime.spans, None
        at = self.parallel.axes.coordinates
        shared = spans if at["dp"] == at["tp"] == at["cp"] == 0 else None
        gathered: list[list[tuple[str, float, float]] | None] = [None] * self.parallel.layout.world
        with self.parallel.axes.recorder.blocking_operation("all_gather", "world", self._gathers):
            dist.all_gather_object(gathered, shared)
        rank_spans = [spans for spans in gathered if spans is not None]  # pp ranks are in the order of world ranks
        return planned_and_measured(self.runtime.recorded_schedule(), rank_spans) if all(rank_spans) else None

    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> Tensor:
        """(sum of losses, number of valid targets) of this rank, by forwards alone."""
        return self.runtime.evaluate(microbatches, self._forward_schedule(len(microbatches)))

    def logits(self, inputs: Mapping[str, Tensor], size: int) -> Tensor:
        """[size]: logits of the token after the only sequence, on every rank."""
        device, context = self.parallel.options.device, self.parallel.cp_context
        if context is not None:
            inputs = context.shard_inputs(inputs, has_loss=False)
        samples = torch.zeros(1, dtype=torch.int64, device=device)
        microbatch = MicrobatchInputs(inputs, samples, full_length=context.seq_len if context else 0)
        logits = self.runtime.logits(microbatch, self._forward_schedule(1))
        last = torch.zeros(size, dtype=torch.float64, device=device)
        if logits is not None:
            last += (logits[:, -1] if context is None else context.last_token(logits))[0, :size]
        return self.parallel.axes["pp"].all_reduce(last)

    def _forward_schedule(self, microbatches: int) -> Schedule:
        return lower(forward_only_schedule(self.schedule.rank_of_stage, microbatches))


def forward_only_schedule(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """The schedule of an evaluation: every forward and nothing else."""
    rank_actions: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for m in range(microbatches):
        for stage, rank in enumerate(rank_of_stage):
            rank_actions[rank].append(Action(stage, ActionKind.FORWARD, m))
    lists, homes = tuple(map(tuple, rank_actions)), tuple(rank_of_stage)
    return Schedule(name="forward", rank_of_stage=homes, microbatches=microbatches, rank_actions=lists)
