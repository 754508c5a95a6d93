"""`Pipeline`: a layout's schedule, its stages, and the runtime that brings them together on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.faults.flight_recorder import here
from echelon.layout import Layout, Mesh
from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNCHRONOUS
from echelon.parallel.apply import Options, Parallel, apply
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.tp.tensor_parallel import Traffic
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.pipeline.actions import SENDS, Action, Kind
from echelon.pipeline.async_.async_runtime import StreamRuntime, Update
from echelon.pipeline.execution.runtime import Runtime, Work
from echelon.pipeline.execution.stage import cut
from echelon.pipeline.execution.timeline_recording import timelines
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make, of_layout
from echelon.pipeline.simulate import simulate
from echelon.pipeline.slices.slice_runtime import SliceRuntime
from echelon.pipeline.timeline import Timeline
from echelon.pipeline.validate import joined


class Pipeline:
    """One rank's part of a pipelined model."""

    def __init__(self, model: nn.Module, layout: Layout, options: Options):
        self.schedule = lower(of_layout(layout))
        self.stages = cut(model, self.schedule.homes, options.stage_layers, options.link_costs)
        rank = Mesh(layout).coordinates(world_rank())["pp"]
        held = replace(self.stages.held(rank), in_flight=in_flight(self.schedule, rank, layout))
        self.parallel = apply(model, layout, options, held)
        links = [self.stages.links(stage) for stage in range(self.schedule.stages)]
        self.asynchronous = layout.schedule in ASYNCHRONOUS
        self._gathers = here.lane(range(layout.world))
        self.runtime: Runtime
        if self.asynchronous:
            refuse_copies(self.parallel)
            every = layout.accumulate // self.updates
            self.runtime = StreamRuntime(self.parallel, self.stages.chain, links, self.schedule, per_update=every)
        elif layout.schedule == "terapipe":
            given = options.slices
            self.runtime = SliceRuntime(self.parallel, self.stages.chain, links, self.schedule, given=given)
        else:
            self.runtime = Runtime(self.parallel, self.stages.chain, links, self.schedule)

    # -- cost ---------------------------------------------------------------------------------------------------------

    @property
    def uses(self) -> dict[str, int]:
        """How many of this rank's stages use each unit."""
        return {
            unit.unit.name: sum(unit in part for part in self.parallel.flat.parts) for unit in self.parallel.flat.units
        }

    @property
    def updates(self) -> int:
        """Updates of a step: PipeDream's two make one of every microbatch."""
        layout = self.parallel.layout
        return layout.accumulate if self.asynchronous and layout.schedule != "2bw" else 1

    @property
    def versions(self) -> int:
        """The most versions of its weights that this rank holds at once."""
        layout = self.parallel.layout
        if not self.asynchronous:
            return 1
        # After as many microbatches as there are stages, and two steps more, a stream only repeats itself.
        steps = range(2 + -(-layout.pp // layout.accumulate))
        windows = [
            make(layout.schedule, layout.pp, layout.accumulate, first=step * layout.accumulate, drain=False)
            for step in steps
        ]
        return simulate(joined(windows)).versions[self.runtime.rank]

    def news(self) -> list[Collective]:
        """What tells the stages of an asynchronous schedule how many targets an update has."""
        return self.runtime.news(self.updates) if isinstance(self.runtime, StreamRuntime) else []

    def share(self, traffic: Traffic) -> Traffic:
        """A transformer's traffic on this rank alone."""
        stages, last = self.schedule.of(self.runtime.rank), self.schedule.stages - 1
        links = sum(len(self.stages.split.links[stage]) for stage in stages)
        return replace(traffic, layers=links - (0 in stages) - (last in stages), first=0 in stages, last=last in stages)

    def slices(self, traffic: Traffic) -> tuple[int, ...]:
        """The lengths of a sequence's slices; none where sequences are whole."""
        return self.runtime.parts(traffic.seq_len) if isinstance(self.runtime, SliceRuntime) else ()

    def scheduled(self, seq_len: int) -> Schedule:
        """The schedule of a step; only TeraPipe's depends on the length of the sequences."""
        return self.runtime.scheduled(seq_len) if isinstance(self.runtime, SliceRuntime) else self.schedule

    def messages(self, traffic: Traffic) -> list[Collective]:
        """What this rank sends to other stages of a transformer in a step."""
        layout, slices = self.parallel.layout, self.slices(traffic)
        schedule = self.scheduled(traffic.seq_len)
        actions = [action for action in schedule.lists[self.runtime.rank] if action.kind in SENDS]
        sends = Counter(action.part for action in actions)
        rows, columns = tp_grid_cost.block(layout, traffic.batch, traffic.width)
        found = []
        for part, count in sorted(sends.items()):
            length = slices[part] if slices else traffic.seq_len
            positions = -(-length // layout.tp) if layout.sp else length
            size = rows * positions * columns * traffic.element_bytes
            found.append(Collective(kind="send", axis="pp", bytes=size, count=count, hidden=True, part="activations"))
        mixed = sum(self._has_losses(action, traffic) for action in actions)
        size = traffic.batch * traffic.loss_bytes
        return [*found, Collective(kind="send", axis="pp", bytes=size, count=mixed, hidden=True, part="balance losses")]

    def _has_losses(self, action: Action, traffic: Traffic) -> bool:
        """What is sent comes from behind a layer with experts, or goes back there."""
        stages = action.stage + (action.kind is Kind.SEND_FORWARD)
        layers = sum(len(self.stages.split.links[stage]) for stage in range(stages)) - 1  # the first is the embedding
        return traffic.mixed_from is not None and layers > traffic.mixed_from

    # -- one step -----------------------------------------------------------------------------------------------------

    def train(self, works: Sequence[Work], seed: float | Tensor) -> Tensor:
        """(sum of losses, number of valid targets) of this rank; gradients of the sum times `seed` are reduced."""
        return self.runtime.train(works, seed)

    def window(self, works: Sequence[Work], update: Update, lr: float) -> Tensor:
        """The same for an asynchronous schedule, which updates as it goes."""
        assert isinstance(self.runtime, StreamRuntime)
        self.runtime.update = update
        return self.runtime.window(works, lr)

    def start_from(self, scale: float, count: float) -> None:
        """Before the first window of an asynchronous schedule: the loss scale, and the targets to expect."""
        assert isinstance(self.runtime, StreamRuntime)
        self.runtime.start_from(scale, count)

    def drain(self) -> None:
        """What an asynchronous schedule has under way is brought to its end."""
        if isinstance(self.runtime, StreamRuntime):
            self.runtime.drain()

    def record(self) -> None:
        """The next step's actions are recorded."""
        self.runtime.spans = []

    def recorded(self) -> tuple[Timeline, Timeline] | None:
        """(planned, measured) of the step that was recorded, on every rank; ends the recording."""
        mine, self.runtime.spans = self.runtime.spans, None
        at = self.parallel.axes.at
        shown = mine if at["dp"] == at["tp"] == at["cp"] == 0 else None
        every: list[list[tuple[str, float, float]] | None] = [None] * self.parallel.layout.world
        with here.doing("all_gather", "world", self._gathers):
            dist.all_gather_object(every, shown)
        spans = [found for found in every if found is not None]  # ranks of pp are in the order of the world's
        schedule = self.runtime.window_lists() if isinstance(self.runtime, StreamRuntime) else self.runtime.schedule
        return timelines(schedule, spans) if all(spans) else None

    def evaluate(self, works: Sequence[Work]) -> Tensor:
        return self.runtime.evaluate(works, lower(forwards(self.schedule.homes, len(works))))

    def logits(self, inputs: Mapping[str, Tensor], size: int) -> Tensor:
        """[size]: what the model says comes after the last position of the only row, on every rank."""
        device, context = self.parallel.options.device, self.parallel.context
        if context is not None:
            inputs = context.cut(inputs, counted=False)
        number = torch.zeros(1, dtype=torch.int64, device=device)
        work = Work(inputs, number, length=context.length if context else 0)
        found = self.runtime.logits(work, lower(forwards(self.schedule.homes, 1)))
        told = torch.zeros(size, dtype=torch.float64, device=device)
        if found is not None:
            told += (found[:, -1] if context is None else context.last(found))[0, :size]
        return self.parallel.axes["pp"].all_reduce(told)


def in_flight(schedule: Schedule, rank: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """How many microbatches each of a rank's stages has between forward and backward, at moments that no other exceeds.

    An asynchronous schedule never runs empty: a stage has as many under way as there are stages from it to the end."""
    mine = schedule.of(rank)
    if layout.schedule in ASYNCHRONOUS:
        return (tuple(schedule.stages - stage for stage in mine),)
    now, found = Counter[int](), set()
    for action in schedule.lists[rank]:
        if action.kind is Kind.FORWARD:
            now[action.stage] += 1
            found.add(tuple(-(-now[stage] // schedule.slices) for stage in mine))
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            now[action.stage] -= 1
    return tuple(
        sorted(
            one
            for one in found
            if not any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in found)
        )
    )


def refuse_copies(parallel: Parallel) -> None:
    """Stages that update on their own cannot hold one weight together."""
    tied = [entry.name for entry in parallel.placement.entries.values() if entry.holders]
    if tied:
        raise ValueError(
            f"schedule={parallel.layout.schedule} updates every stage on its own, and {tied[0]} is on several stages; "
            "untie it (tied=false), or use schedule=1f1b"
        )


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
