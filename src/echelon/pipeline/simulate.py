"""`simulate`: given how long actions and messages take, when every action of a schedule runs.

[Note: the rules of time]

A rank runs its list in order, one action at a time. An action starts when the one before it has ended and what it needs
is there:

    F  needs F of the stage before, over the link between their ranks
    B  needs its own F, and B (or I) of the stage after, over the link; so does I
    W  needs its own I

1. A message takes the link's time once. Messages from one rank to another travel one by one in the order in which they
   were sent, in a lane of their own. Between two stages of one rank nothing is sent.
2. Sends occupy the lane, not the rank, unless `overlap` is off. A list without communication sends what F, B or I made
   when they end; in a lowered list a send leaves when the rank comes to it. A receive opens the door, and the F or B
   behind it waits; so a receive that stands early in a list costs nothing.
3. K and D take no time.

Each lane has one sender, whose list orders its messages. So nothing has to be ordered across ranks: every rank runs as
far as it can, and a message wakes the rank that waits for it. There is no clock and no queue of events; the work is
constant for each action.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from echelon.pipeline.actions import COMPUTE, LATEST, RECEIVES, SENDS, VERSIONS, Action, ActionKind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.timeline import PerStage, Timeline, per_stage

__all__ = ["UNIT", "Durations", "Timeline", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of actions and messages; one number for all stages, or one for each."""

    forward: PerStage = 1.0
    """seconds of F: of one stage on one microbatch (on one slice, where there are slices)"""
    input_grad: PerStage = 1.0
    """seconds of I"""
    weight_grad: PerStage = 1.0
    """seconds of W; B takes those of I and W together"""
    update: PerStage = 0.0
    """seconds of U"""
    slices: tuple[float, ...] = ()
    """how many times these seconds F, B, I and W take on each slice; empty: once on all of them"""
    send_forward: PerStage = 0.0
    """seconds of a message from a stage to the next: latency + bytes / bandwidth"""
    send_backward: PerStage = 0.0
    """seconds of a message from a stage to the one before"""
    overlap: bool = True
    """whether a rank computes while it sends"""

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "update", "slices", "send_forward", "send_backward"):
            value = getattr(self, name)
            if not all(0 <= seconds < math.inf for seconds in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"seconds are negative or not finite ({name}={value}); give 0 or more")


FORWARD, INPUT, WEIGHT = (
    ActionKind.FORWARD,
    ActionKind.INPUT_GRAD,
    ActionKind.WEIGHT_GRAD,
)  # attributes of an enum are slow

UNIT = Durations()
"""F, I and W take 1, all else nothing: what the formulas of the bubble suppose"""


def simulate(schedule: Schedule, durations: Durations = UNIT) -> Timeline:
    """The timeline of a schedule, with or without its communication."""
    return _Simulator(schedule, durations).run()


_Wait = tuple[Action, int, str]
"""an action, and the stage and kind of the one that it waits for, which is of the same microbatch"""


class _Direction:
    """Messages in one direction: forward, or backward. A key is a number for (microbatch, slice, stage)."""

    def __init__(self, schedule: Schedule, seconds: PerStage, *, is_backward: bool) -> None:
        self.step, self.letter = (-1, "B") if is_backward else (1, "F")
        self.first, self.last = (schedule.stages - 1, 0) if is_backward else (0, schedule.stages - 1)
        self.seconds = per_stage(seconds, schedule.stages)
        self.ready_to_send: set[int] = set()
        """what is ready for its send, by the key of the sender"""
        self.posted_receives: dict[int, int] = {}
        """where in its list a receive stands, by the key of the receiver; -1: before this window"""
        self.arrived: dict[int, float] = {}
        """when a message is there, likewise"""
        self.waiting: set[int] = set()
        """the messages that ranks wait for, likewise"""


class _Simulator:
    """All ranks at work."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        stages = schedule.stages
        self.schedule, self.overlap = schedule, durations.overlap
        inputs, weights = per_stage(durations.input_grad, stages), per_stage(durations.weight_grad, stages)
        self.seconds = {
            ActionKind.FORWARD: per_stage(durations.forward, stages),
            ActionKind.BACKWARD: tuple(one + other for one, other in zip(inputs, weights, strict=True)),
            ActionKind.INPUT_GRAD: inputs,
            ActionKind.WEIGHT_GRAD: weights,
            ActionKind.UPDATE: per_stage(durations.update, stages),
            ActionKind.STASH: (0.0,) * stages,
            ActionKind.DROP_STASHED: (0.0,) * stages,
        }
        every = list(chain.from_iterable(schedule.rank_actions))
        if (top := max((action.stage for action in every), default=0)) >= stages:
            raise ValueError(f"an action of stage {top} in a schedule of {stages} stages; add its home or leave it out")
        self.num_slices = 1 + max((action.slice_index for action in every), default=0)
        self.slice_factors = durations.slices or (1.0,) * self.num_slices
        if len(self.slice_factors) < self.num_slices:
            raise ValueError(
                f"{len(self.slice_factors)} factors for {self.num_slices} slices ({self.slice_factors}); give one for each"
            )
        self.is_lowered = any(action.kind in SENDS or action.kind in RECEIVES for action in every)
        self.forward = _Direction(schedule, durations.send_forward, is_backward=False)
        self.backward = _Direction(schedule, durations.send_backward, is_backward=True)
        self.link_free_at: dict[tuple[int, int], float] = {}
        """when the lane from one rank to another is free again"""
        self.in_flight: set[int] = set()
        """forward has run, backward has not"""
        self.pending_weight_grads: set[int] = set()
        """I has run, W has not"""
        self.runnable_ranks = deque(range(schedule.ranks))
        self._inherit_window(every)

    def run(self) -> Timeline:
        lists = self.schedule.rank_actions
        starts, ends = ([[0.0] * len(actions) for actions in lists] for _ in range(2))
        walks = [self._run_rank(rank, starts[rank], ends[rank]) for rank in range(len(lists))]
        wants: list[_Wait | None] = [None] * len(lists)
        while self.runnable_ranks:
            rank = self.runnable_ranks.popleft()
            wants[rank] = next(walks[rank], None)
        if why := ", ".join(self._describe_wait(rank, want) for rank, want in enumerate(wants) if want):
            raise ValueError(f"the schedule cannot finish ({self.schedule.name}: {why}); change the order of its lists")
        return Timeline(
            name=self.schedule.name,
            rank_of_stage=self.schedule.rank_of_stage,
            rank_actions=lists,
            starts=tuple(map(tuple, starts)),
            ends=tuple(map(tuple, ends)),
            note=self.schedule.note,
        )

    def _run_rank(self, rank: int, starts: list[float], ends: list[float]) -> Iterator[_Wait]:
        """Runs a rank's list. Gives what it waits for whenever that is not there."""
        homes, factors, seconds, is_lowered = (
            self.schedule.rank_of_stage,
            self.slice_factors,
            self.seconds,
            self.is_lowered,
        )
        onward, back, held, halves = self.forward, self.backward, self.in_flight, self.pending_weight_grads
        parts, stages, now = self.num_slices, len(homes), 0.0
        for position, action in enumerate(self.schedule.rank_actions[rank]):
            stage, kind, index, part, _ = action
            key = (index * parts + part) * stages + stage
            if kind in COMPUTE:
                start, way = now, onward if kind is FORWARD else back
                if kind is not FORWARD:
                    needed = halves if kind is WEIGHT else held
                    while key not in needed:
                        yield action, stage, "I" if kind is WEIGHT else "F"
                    needed.remove(key)
                if kind is not WEIGHT and stage != way.first:
                    if is_lowered and homes[stage - way.step] != rank:
                        while key not in way.posted_receives:
                            yield action, stage, "R" + way.letter
                        door, source = way.posted_receives.pop(key), "S" + way.letter
                    else:
                        door, source = -1, way.letter
                    while key not in way.arrived:
                        way.waiting.add(key)
                        yield action, stage - way.step, source
                    came = way.arrived.pop(key)
                    if came > now:
                        start = came
                    if door >= 0:
                        ends[door] = max(came, starts[door])
                starts[position] = start
                ends[position] = now = start + seconds[kind][stage] * factors[part]
                if kind is FORWARD:
                    held.add(key)
                elif kind is INPUT:
                    halves.add(key)
                if kind is not WEIGHT and stage != way.last:
                    if homes[stage + way.step] == rank:
                        way.arrived[key + way.step] = now
                    elif is_lowered:
                        way.ready_to_send.add(key)
                    else:
                        _, gone = self._send(way, rank, stage, key, now)
                        now = now if self.overlap else gone
            elif kind in VERSIONS:
                starts[position] = now
                ends[position] = now = now + seconds[kind][stage]
            elif kind in SENDS:
                way = onward if kind is ActionKind.SEND_FORWARD else back
                while key not in way.ready_to_send:
                    yield action, stage, way.letter
                way.ready_to_send.remove(key)
                starts[position], ends[position] = self._send(way, rank, stage, key, now)
                now = now if self.overlap else ends[position]
            else:
                (onward if kind is ActionKind.RECEIVE_FORWARD else back).posted_receives[key] = position
                starts[position] = ends[position] = now

    def _send(self, way: _Direction, rank: int, stage: int, key: int, now: float) -> tuple[float, float]:
        """When a message leaves and when it is there. Wakes who waits for it."""
        home, there = self.schedule.rank_of_stage[stage + way.step], key + way.step
        lane = rank, home
        free = self.link_free_at.get(lane, 0.0)
        start = now if now > free else free
        self.link_free_at[lane] = way.arrived[there] = end = start + way.seconds[stage]
        if there in way.waiting:
            way.waiting.remove(there)
            self.runnable_ranks.append(home)
        return start, end

    def _inherit_window(self, actions: list[Action]) -> None:
        """What a window of an endless stream finds: microbatches whose forward ran before it, messages on their way."""
        first = min((action.index for action in actions if action.kind is FORWARD), default=math.inf)
        old = {action[:4] for action in actions if action.index < first and action.kind not in VERSIONS}
        for stage, kind, index, part in old:
            key = (index * self.num_slices + part) * self.schedule.stages + stage
            if kind is ActionKind.WEIGHT_GRAD and (stage, ActionKind.INPUT_GRAD, index, part) not in old:
                self.pending_weight_grads.add(key)
            if kind not in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
                continue
            self.in_flight.add(key)
            if (stage, ActionKind.RECEIVE_BACKWARD, index, part) not in old:
                self.backward.posted_receives[key] = -1
            sent = {
                (stage + 1, kind, index, part)
                for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.SEND_BACKWARD)
            }
            if not old & sent:
                self.backward.arrived[key] = 0.0

    def _describe_wait(self, rank: int, wait: _Wait) -> str:
        action, stage, kind = wait
        awaited = action._replace(stage=stage, kind=ActionKind(kind), version=LATEST)
        # A stage that has its backward in two halves passes the gradient on after the first.
        half = awaited._replace(kind=INPUT)
        if kind == "B" and any(
            other[:4] == half[:4] for other in self.schedule.rank_actions[self.schedule.rank_of_stage[stage]]
        ):
            awaited = half
        return f"rank {rank} at {action} waits for {awaited}"
