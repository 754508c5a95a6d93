"""`Pipeline`: a layout's schedule, its stages, and the runtime that brings them together on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.faults.flight_recorder import FlightRecorder
from echelon.layout import Layout, Mesh
from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.parallel.apply import ParallelModel, ParallelOptions, apply
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.tp.tensor_parallel import TransformerSizes
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.pipeline.actions import SENDS, Action, ActionKind
from echelon.pipeline.async_.async_runtime import AsyncRuntime, UpdateFunction
from echelon.pipeline.execution.runtime import MicrobatchInputs, PipelineRuntime
from echelon.pipeline.execution.stage import cut_into_stages
from echelon.pipeline.execution.timeline_recording import planned_and_measured
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule, schedule_for_layout
from echelon.pipeline.simulate import simulate
from echelon.pipeline.slices.slice_runtime import SliceRuntime
from echelon.pipeline.timeline import Timeline
from echelon.pipeline.validate import join_windows


class Pipeline:
    """One rank's part of a pipelined model."""

    def __init__(
        self, model: nn.Module, layout: Layout, options: ParallelOptions, recorder: FlightRecorder | None = None
    ):
        self.schedule = lower(schedule_for_layout(layout))
        self.stages = cut_into_stages(model, self.schedule.rank_of_stage, options.stage_layers, options.layer_costs)
        rank = Mesh(layout).coordinates(world_rank())["pp"]
        held = replace(self.stages.stage_modules(rank), in_flight=peak_in_flight(self.schedule, rank, layout))
        self.parallel = apply(model, layout, options, held, recorder)
        links = [self.stages.layers(stage) for stage in range(self.schedule.stages)]
        self.asynchronous = layout.schedule in ASYNC_SCHEDULES
        self._gathers = self.parallel.axes.recorder.new_sequence(range(layout.world))
        self.runtime: PipelineRuntime
        if self.asynchronous:
            reject_tied_weights(self.parallel)
            every = layout.accumulate // self.updates_per_step
            self.runtime = AsyncRuntime(
                self.parallel, self.stages.pipeline_model, links, self.schedule, microbatches_per_update=every
            )
        elif layout.schedule == "terapipe":
            given = options.slice_lengths
            self.runtime = SliceRuntime(
                self.parallel, self.stages.pipeline_model, links, self.schedule, fixed_lengths=given
            )
        else:
            self.runtime = PipelineRuntime(self.parallel, self.stages.pipeline_model, links, self.schedule)

    # -- cost ---------------------------------------------------------------------------------------------------------

    @property
    def stages_per_param_group(self) -> dict[str, int]:
        """How many of this rank's stages use each unit."""
        return {
            unit.spec.name: sum(unit in part for part in self.parallel.sharded_model.stage_groups)
            for unit in self.parallel.sharded_model.param_groups
        }

    @property
    def updates_per_step(self) -> int:
        """Updates of a step: PipeDream's two make one of every microbatch."""
        layout = self.parallel.layout
        return layout.accumulate if self.asynchronous and layout.schedule != "2bw" else 1

    @property
    def peak_weight_versions(self) -> int:
        """The most versions of its weights that this rank holds at once."""
        layout = self.parallel.layout
        if not self.asynchronous:
            return 1
        # After as many microbatches as there are stages, and two steps more, a stream only repeats itself.
        steps = range(2 + -(-layout.pp // layout.accumulate))
        windows = [
            make_schedule(
                layout.schedule, layout.pp, layout.accumulate, first_microbatch=step * layout.accumulate, drain=False
            )
            for step in steps
        ]
        return simulate(join_windows(windows)).weight_versions[self.runtime.rank]

    def update_collectives(self) -> list[Collective]:
        """What tells the stages of an asynchronous schedule how many targets an update has."""
        return self.runtime.update_collectives(self.updates_per_step) if isinstance(self.runtime, AsyncRuntime) else []

    def rank_share(self, traffic: TransformerSizes) -> TransformerSizes:
        """A transformer's traffic on this rank alone."""
        stages, last = self.schedule.stages_on(self.runtime.rank), self.schedule.stages - 1
        links = sum(len(self.stages.split.layers[stage]) for stage in stages)
        return replace(
            traffic, layers=links - (0 in stages) - (last in stages), has_embedding=0 in stages, has_head=last in stages
        )

    def slice_lengths(self, traffic: TransformerSizes) -> tuple[int, ...]:
        """The lengths of a sequence's slices; none where sequences are whole."""
        return self.runtime.slice_lengths(traffic.seq_len) if isinstance(self.runtime, SliceRuntime) else ()

    def schedule_for(self, seq_len: int) -> Schedule:
        """The schedule of a step; only TeraPipe's depends on the length of the sequences."""
        return self.runtime.schedule_for(seq_len) if isinstance(self.runtime, SliceRuntime) else self.schedule

    def p2p_collectives(self, traffic: TransformerSizes) -> list[Collective]:
        """What this rank sends to other stages of a transformer in a step."""
        layout, slices = self.parallel.layout, self.slice_lengths(traffic)
        schedule = self.schedule_for(traffic.seq_len)
        actions = [action for action in schedule.rank_actions[self.runtime.rank] if action.kind in SENDS]
        sends = Counter(action.slice_index for action in actions)
        rows, columns = tp_grid_cost.local_activation_shape(layout, traffic.batch, traffic.width)
        found = []
        for part, count in sorted(sends.items()):
            length = slices[part] if slices else traffic.seq_len
            positions = -(-length // layout.tp) if layout.sp else length
            size = rows * positions * columns * traffic.element_bytes
            found.append(
                Collective(op="send", axis="pp", bytes=size, count=count, overlapped=True, purpose="activations")
            )
        mixed = sum(self._carries_balance_losses(action, traffic) for action in actions)
        size = traffic.batch * traffic.loss_bytes
        return [
            *found,
            Collective(op="send", axis="pp", bytes=size, count=mixed, overlapped=True, purpose="balance losses"),
        ]

    def _carries_balance_losses(self, action: Action, traffic: TransformerSizes) -> bool:
        """What is sent comes from behind a layer with experts, or goes back there."""
        stages = action.stage + (action.kind is ActionKind.SEND_FORWARD)
        layers = sum(len(self.stages.split.layers[stage]) for stage in range(stages)) - 1  # the first is the embedding
        return traffic.first_moe_layer is not None and layers > traffic.first_moe_layer

    # -- one step -----------------------------------------------------------------------------------------------------

    def train(self, microbatches: Sequence[MicrobatchInputs], grad_seed: float | Tensor) -> Tensor:
        """(sum of losses, number of valid targets) of this rank; gradients of the sum times `seed` are reduced."""
        return self.runtime.train(microbatches, grad_seed)

    def train_window(self, microbatches: Sequence[MicrobatchInputs], update: UpdateFunction, lr: float) -> Tensor:
        """The same for an asynchronous schedule, which updates as it goes."""
        assert isinstance(self.runtime, AsyncRuntime)
        self.runtime.update = update
        return self.runtime.train_window(microbatches, lr)

    def set_loss_scale(self, scale: float, count: float) -> None:
        """Before the first window of an asynchronous schedule: the loss scale, and the targets to expect."""
        assert isinstance(self.runtime, AsyncRuntime)
        self.runtime.set_loss_scale(scale, count)

    def drain(self) -> None:
        """What an asynchronous schedule has under way is brought to its end."""
        if isinstance(self.runtime, AsyncRuntime):
            self.runtime.drain()

    def start_recording(self) -> None:
        """The next step's actions are recorded."""
        self.runtime.spans = []

    def finish_recording(self) -> tuple[Timeline, Timeline] | None:
        """(planned, measured) of the step that was recorded, on every rank; ends the recording."""
        mine, self.runtime.spans = self.runtime.spans, None
        at = self.parallel.axes.coordinates
        shown = mine if at["dp"] == at["tp"] == at["cp"] == 0 else None
        every: list[list[tuple[str, float, float]] | None] = [None] * self.parallel.layout.world
        with self.parallel.axes.recorder.blocking_operation("all_gather", "world", self._gathers):
            dist.all_gather_object(every, shown)
        spans = [found for found in every if found is not None]  # ranks of pp are in the order of the world's
        schedule = self.runtime.last_window() if isinstance(self.runtime, AsyncRuntime) else self.runtime.schedule
        return planned_and_measured(schedule, spans) if all(spans) else None

    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> Tensor:
        return self.runtime.evaluate(
            microbatches, lower(forward_only_schedule(self.schedule.rank_of_stage, len(microbatches)))
        )

    def logits(self, inputs: Mapping[str, Tensor], size: int) -> Tensor:
        """[size]: what the model says comes after the last position of the only row, on every rank."""
        device, context = self.parallel.options.device, self.parallel.cp_context
        if context is not None:
            inputs = context.shard_inputs(inputs, has_loss=False)
        number = torch.zeros(1, dtype=torch.int64, device=device)
        work = MicrobatchInputs(inputs, number, full_length=context.seq_len if context else 0)
        found = self.runtime.logits(work, lower(forward_only_schedule(self.schedule.rank_of_stage, 1)))
        told = torch.zeros(size, dtype=torch.float64, device=device)
        if found is not None:
            told += (found[:, -1] if context is None else context.last_token(found))[0, :size]
        return self.parallel.axes["pp"].all_reduce(told)


def peak_in_flight(schedule: Schedule, rank: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """How many microbatches each of a rank's stages has between forward and backward, at moments that no other exceeds.

    An asynchronous schedule never runs empty: a stage has as many under way as there are stages from it to the end."""
    mine = schedule.stages_on(rank)
    if layout.schedule in ASYNC_SCHEDULES:
        return (tuple(schedule.stages - stage for stage in mine),)
    now, found = Counter[int](), set()
    for action in schedule.rank_actions[rank]:
        if action.kind is ActionKind.FORWARD:
            now[action.stage] += 1
            found.add(tuple(-(-now[stage] // schedule.slices) for stage in mine))
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            now[action.stage] -= 1
    return tuple(
        sorted(
            one
            for one in found
            if not any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in found)
        )
    )


def reject_tied_weights(parallel: ParallelModel) -> None:
    """Stages that update on their own cannot hold one weight together."""
    tied = [entry.name for entry in parallel.placement.params.values() if entry.tied_pp_ranks]
    if tied:
        raise ValueError(
            f"schedule={parallel.layout.schedule} updates every stage on its own, and {tied[0]} is on several stages; "
            "untie it (tied=false), or use schedule=1f1b"
        )


def forward_only_schedule(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """Every forward and nothing else, for evaluation."""
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
