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
from echelon.parallel.tp.cost import TransformerSizes
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.pipeline.actions import SENDS, Action, ActionKind
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.execution.stage_assignment import StageAssignment
from echelon.pipeline.execution.timeline_recording import planned_and_measured
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import runtime_path, updates_per_step
from echelon.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from echelon.pipeline.async_.async_runtime import AsyncRuntime, UpdateFunction


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
        layers = [self.stages.layers(stage) for stage in range(self.schedule.stages)]
        self.runtime = runtime_class(parallel, self.stages.pipeline_model, layers, self.schedule)

    # -- cost ---------------------------------------------------------------------------------------------------------

    @property
    def stages_per_param_group(self) -> dict[str, int]:
        """How many of this rank's stages use each parameter group."""
        sharded = self.parallel.sharded_model
        return {
            group.spec.name: sum(group in of_stage for of_stage in sharded.stage_groups)
            for group in sharded.param_groups
        }

    @property
    def peak_weight_versions(self) -> int:
        """The most versions of its weights that this rank holds at once."""
        return self.runtime.peak_weight_versions()

    def update_collectives(self) -> list[Collective]:
        """What an asynchronous schedule communicates for the updates of a step."""
        return self.runtime.update_collectives()

    def rank_share(self, sizes: TransformerSizes) -> TransformerSizes:
        """A transformer's sizes on this rank alone."""
        stages, last = self.schedule.stages_on(self.runtime.rank), self.schedule.stages - 1
        layers = sum(len(self.stages.split.layers[stage]) for stage in stages)
        has_embedding, has_head = 0 in stages, last in stages
        return replace(sizes, layers=layers - has_embedding - has_head, has_embedding=has_embedding, has_head=has_head)

    def slice_lengths(self, sizes: TransformerSizes) -> tuple[int, ...]:
        """The lengths of a sequence's slices; empty where sequences are not sliced."""
        return self.runtime.slice_lengths(sizes.seq_len)

    def schedule_for(self, seq_len: int) -> Schedule:
        """The schedule of a step; only TeraPipe's depends on the sequence length."""
        return self.runtime.schedule_for(seq_len)

    def p2p_collectives(self, sizes: TransformerSizes) -> list[Collective]:
        """What this rank of a transformer sends to other stages in a step."""
        layout, slices = self.parallel.layout, self.slice_lengths(sizes)
        schedule = self.schedule_for(sizes.seq_len)
        actions = [action for action in schedule.rank_actions[self.runtime.rank] if action.kind in SENDS]
        sends = Counter(action.slice_index for action in actions)
        sequences, width = tp_grid_cost.local_activation_shape(layout, sizes.batch, sizes.width)

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

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        """Run a synchronous step up to its reduced gradients, of the loss times `grad_seed`.

        Returns (sum of losses, number of valid targets) of this rank.
        """
        return self.runtime.train(microbatches, grad_seed)

    def train_window(self, microbatches: Sequence[MicrobatchInputs], update: UpdateFunction, lr: float) -> Tensor:
        """Run a step of an asynchronous schedule, which calls `update` as it goes."""
        return self._async_runtime.train_window(microbatches, update, lr)

    def set_loss_scale(self, scale: float, num_targets: float) -> None:
        """Set the loss scale before the first window of an asynchronous schedule, and the targets to expect of it."""
        self._async_runtime.set_loss_scale(scale, num_targets)

    def drain(self) -> None:
        """Finish the microbatches that an asynchronous schedule has in flight."""
        self.runtime.drain()

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

    @property
    def _async_runtime(self) -> AsyncRuntime:
        assert self.asynchronous
        return cast("AsyncRuntime", self.runtime)


def forward_only_schedule(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """The schedule of an evaluation: every forward and nothing else."""
    return Schedule(
        name="forward",
        rank_of_stage=tuple(rank_of_stage),
        microbatches=microbatches,
        rank_actions=tuple(
            tuple(
                Action(stage, ActionKind.FORWARD, m)
                for m in range(microbatches)
                for stage, home in enumerate(rank_of_stage)
                if home == rank
            )
            for rank in range(max(rank_of_stage) + 1)
        ),
    )
