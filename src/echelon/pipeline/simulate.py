"""`simulate`: the time of every action of a schedule, from the durations of actions and transfers.

[Note: the rules of time]

A rank runs its actions in order, one at a time. An action starts when the one before it has ended and its dependencies
are met:

    F  depends on F of the previous stage, over the link between their ranks
    B  depends on its F, and on B (or I) of the next stage, over the link; so does I
    W  depends on its I

1. A transfer takes the link's time. Transfers from one rank to another use one link, one by one in the order of their
   sends. Two stages of one rank exchange tensors in no time.
2. Sends occupy the link, not the rank, unless `overlap` is off. In a schedule without sends, the output of F, B or I is
   sent when they end; in a lowered one when the rank reaches the send. A receive takes no time: the F or B that uses it
   waits, so posting a receive early is free.
3. K and D take no time.

Each link has one sender, whose actions order its transfers. So nothing has to be ordered across ranks: each rank
runs as far as it can, and a transfer wakes the rank that waits for it. There is no clock and no event queue; the cost
is constant per action.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from echelon.pipeline.actions import COMPUTE, FORWARD, INPUT_GRAD, SENDS, VERSIONS, WEIGHT_GRAD, Action, ActionKind
from echelon.pipeline.dependencies import is_lowered
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.timeline import PerStage, Timeline, per_stage


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of actions and transfers; one number for all stages, or one for each."""

    forward: PerStage = 1.0
    """seconds of F: one stage, one microbatch (or slice)"""
    input_grad: PerStage = 1.0
    """seconds of I"""
    weight_grad: PerStage = 1.0
    """seconds of W; B takes those of I and W"""
    update: PerStage = 0.0
    """seconds of U"""
    slices: tuple[float, ...] = ()
    """the factor of F, B, I and W on each slice; empty: 1 on all of them"""
    send_forward: PerStage = 0.0
    """seconds of a transfer to the next stage: latency + bytes / bandwidth"""
    send_backward: PerStage = 0.0
    """seconds of a transfer to the previous stage"""
    overlap: bool = True
    """whether a rank computes while it sends"""

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "update", "slices", "send_forward", "send_backward"):
            value = getattr(self, name)
            if not all(0 <= seconds < math.inf for seconds in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"seconds are negative or not finite ({name}={value}); give 0 or more")


UNIT = Durations()
"""F, I and W take 1, all else nothing: the assumption of the bubble formulas"""


def simulate(schedule: Schedule, durations: Durations = UNIT) -> Timeline:
    """The timeline of a schedule, with or without its sends and receives."""
    return _Simulator(schedule, durations).run()


_Wait = tuple[Action, int, str]
"""an action, and the stage and kind of the action that it waits for, of the same microbatch"""


class _Direction:
    """The transfers of one direction. A key encodes (microbatch, slice, stage) as one integer."""

    def __init__(self, schedule: Schedule, seconds: PerStage, *, is_backward: bool) -> None:
        self.step, self.letter = (-1, "B") if is_backward else (1, "F")
        self.first, self.last = (schedule.stages - 1, 0) if is_backward else (0, schedule.stages - 1)
        self.seconds = per_stage(seconds, schedule.stages)
        self.ready_to_send: set[int] = set()
        """outputs to send, by the key of the sender"""
        self.posted_receives: dict[int, int] = {}
        """the position of each posted receive, by the key of the receiver; -1: in an earlier window"""
        self.arrived: dict[int, float] = {}
        """the arrival time of each transfer, by the key of the receiver"""
        self.waiting: set[int] = set()
        """transfers that a rank waits for, by the key of the receiver"""


class _Simulator:
    """The state of all ranks."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        stages = schedule.stages
        self.schedule, self.overlap = schedule, durations.overlap
        inputs, weights = per_stage(durations.input_grad, stages), per_stage(durations.weight_grad, stages)
        self.seconds = {
            FORWARD: per_stage(durations.forward, stages),
            ActionKind.BACKWARD: tuple(one + other for one, other in zip(inputs, weights, strict=True)),
            INPUT_GRAD: inputs,
            WEIGHT_GRAD: weights,
            ActionKind.UPDATE: per_stage(durations.update, stages),
            ActionKind.STASH: (0.0,) * stages,
            ActionKind.DROP_STASHED: (0.0,) * stages,
        }
        actions = list(chain.from_iterable(schedule.rank_actions))
        if (top := max((action.stage for action in actions), default=0)) >= stages:
            raise ValueError(
                f"an action of stage {top} in a schedule of {stages} stages; add the stage's rank or remove the action"
            )
        self.num_slices = 1 + max((action.slice_index for action in actions), default=0)
        self.slice_factors = durations.slices or (1.0,) * self.num_slices
        if len(self.slice_factors) < self.num_slices:
            factors = f"{len(self.slice_factors)} factors for {self.num_slices} slices ({self.slice_factors})"
            raise ValueError(f"{factors}; give one per slice")
        self.is_lowered = is_lowered(schedule)
        self.forward = _Direction(schedule, durations.send_forward, is_backward=False)
        self.backward = _Direction(schedule, durations.send_backward, is_backward=True)
        self.link_free_at: dict[tuple[int, int], float] = {}
        """when the link from one rank to another is free again"""
        self.in_flight: set[int] = set()
        """F has run, B or I has not"""
        self.pending_weight_grads: set[int] = set()
        """I has run, W has not"""
        self.runnable_ranks = deque(range(schedule.ranks))
        self._inherit_window(actions)

    def run(self) -> Timeline:
        lists = self.schedule.rank_actions
        starts, ends = ([[0.0] * len(actions) for actions in lists] for _ in range(2))
        walks = [self._run_rank(rank, starts[rank], ends[rank]) for rank in range(len(lists))]
        wants: list[_Wait | None] = [None] * len(lists)
        while self.runnable_ranks:
            rank = self.runnable_ranks.popleft()
            wants[rank] = next(walks[rank], None)
        if why := ", ".join(self._describe_wait(rank, want) for rank, want in enumerate(wants) if want):
            raise ValueError(f"the schedule deadlocks ({self.schedule.name}: {why}); change the order of its actions")
        return Timeline(
            name=self.schedule.name,
            rank_of_stage=self.schedule.rank_of_stage,
            rank_actions=lists,
            starts=tuple(map(tuple, starts)),
            ends=tuple(map(tuple, ends)),
            note=self.schedule.note,
        )

    def _run_rank(self, rank: int, starts: list[float], ends: list[float]) -> Iterator[_Wait]:  # noqa: C901
        """Run a rank's actions; yield what the rank waits for. One loop, for the speed of a million actions."""
        rank_of_stage = self.schedule.rank_of_stage
        factors, seconds = self.slice_factors, self.seconds
        is_lowered = self.is_lowered
        forward, backward = self.forward, self.backward
        in_flight, pending_weight_grads = self.in_flight, self.pending_weight_grads
        num_slices, stages, now = self.num_slices, len(rank_of_stage), 0.0
        for position, action in enumerate(self.schedule.rank_actions[rank]):
            stage, kind, index, slice_index, _ = action
            key = (index * num_slices + slice_index) * stages + stage
            if kind in COMPUTE:
                start, direction = now, forward if kind is FORWARD else backward
                if kind is not FORWARD:
                    needed = pending_weight_grads if kind is WEIGHT_GRAD else in_flight
                    while key not in needed:
                        yield action, stage, "I" if kind is WEIGHT_GRAD else "F"
                    needed.remove(key)
                if kind is not WEIGHT_GRAD and stage != direction.first:
                    if is_lowered and rank_of_stage[stage - direction.step] != rank:
                        while key not in direction.posted_receives:
                            yield action, stage, "R" + direction.letter
                        receive_position, source = direction.posted_receives.pop(key), "S" + direction.letter
                    else:
                        receive_position, source = -1, direction.letter
                    while key not in direction.arrived:
                        direction.waiting.add(key)
                        yield action, stage - direction.step, source
                    arrival = direction.arrived.pop(key)
                    if arrival > now:
                        start = arrival
                    if receive_position >= 0:
                        ends[receive_position] = max(arrival, starts[receive_position])
                starts[position] = start
                ends[position] = now = start + seconds[kind][stage] * factors[slice_index]
                if kind is FORWARD:
                    in_flight.add(key)
                elif kind is INPUT_GRAD:
                    pending_weight_grads.add(key)
                if kind is not WEIGHT_GRAD and stage != direction.last:
                    if rank_of_stage[stage + direction.step] == rank:
                        direction.arrived[key + direction.step] = now
                    elif is_lowered:
                        direction.ready_to_send.add(key)
                    else:
                        _, sent_at = self._send(direction, rank, stage, key, now)
                        now = now if self.overlap else sent_at
            elif kind in VERSIONS:
                starts[position] = now
                ends[position] = now = now + seconds[kind][stage]
            elif kind in SENDS:
                direction = forward if kind is ActionKind.SEND_FORWARD else backward
                while key not in direction.ready_to_send:
                    yield action, stage, direction.letter
                direction.ready_to_send.remove(key)
                starts[position], ends[position] = self._send(direction, rank, stage, key, now)
                now = now if self.overlap else ends[position]
            else:
                (forward if kind is ActionKind.RECEIVE_FORWARD else backward).posted_receives[key] = position
                starts[position] = ends[position] = now

    def _send(self, direction: _Direction, rank: int, stage: int, key: int, now: float) -> tuple[float, float]:
        """The start and end of a transfer. Wakes the rank that waits for it."""
        receiver, there = self.schedule.rank_of_stage[stage + direction.step], key + direction.step
        link = rank, receiver
        free = self.link_free_at.get(link, 0.0)
        start = now if now > free else free
        self.link_free_at[link] = direction.arrived[there] = end = start + direction.seconds[stage]
        if there in direction.waiting:
            direction.waiting.remove(there)
            self.runnable_ranks.append(receiver)
        return start, end

    def _inherit_window(self, actions: list[Action]) -> None:
        """Set up what earlier windows of a stream left: microbatches in flight, transfers that have arrived."""
        first = min((action.index for action in actions if action.kind is FORWARD), default=math.inf)
        old = {action[:4] for action in actions if action.index < first and action.kind not in VERSIONS}
        for stage, kind, index, slice_index in old:
            key = (index * self.num_slices + slice_index) * self.schedule.stages + stage
            if kind is WEIGHT_GRAD and (stage, INPUT_GRAD, index, slice_index) not in old:
                self.pending_weight_grads.add(key)
            if kind not in (ActionKind.BACKWARD, INPUT_GRAD):
                continue
            self.in_flight.add(key)
            if (stage, ActionKind.RECEIVE_BACKWARD, index, slice_index) not in old:
                self.backward.posted_receives[key] = -1
            sends = (ActionKind.BACKWARD, INPUT_GRAD, ActionKind.SEND_BACKWARD)
            if not any((stage + 1, kind, index, slice_index) in old for kind in sends):
                self.backward.arrived[key] = 0.0

    def _describe_wait(self, rank: int, wait: _Wait) -> str:
        action, stage, kind = wait
        awaited = Action(stage, ActionKind(kind), action.index, action.slice_index)
        # A stage that splits its backward sends the gradient after I.
        half = awaited._replace(kind=INPUT_GRAD)
        actions = self.schedule.rank_actions[self.schedule.rank_of_stage[stage]]
        if kind == "B" and any(other[:4] == half[:4] for other in actions):
            awaited = half
        return f"rank {rank} at {action} waits for {awaited}"
