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

from echelon.pipeline.actions import COMPUTE, NEWEST, RECEIVES, SENDS, VERSIONS, Action, Kind
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


FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT  # attributes of an enum are slow

UNIT = Durations()
"""F, I and W take 1, all else nothing: what the formulas of the bubble suppose"""


def simulate(schedule: Schedule, durations: Durations = UNIT) -> Timeline:
    """The timeline of a schedule, with or without its communication."""
    return _Machine(schedule, durations).run()


_Want = tuple[Action, int, str]
"""an action, and the stage and kind of the one that it waits for, which is of the same microbatch"""


class _Way:
    """Messages in one direction: forward, or backward. A key is a number for (microbatch, slice, stage)."""

    def __init__(self, schedule: Schedule, seconds: PerStage, *, is_back: bool) -> None:
        self.step, self.letter = (-1, "B") if is_back else (1, "F")
        self.first, self.last = (schedule.stages - 1, 0) if is_back else (0, schedule.stages - 1)
        self.seconds = per_stage(seconds, schedule.stages)
        self.made: set[int] = set()
        """what is ready for its send, by the key of the sender"""
        self.doors: dict[int, int] = {}
        """where in its list a receive stands, by the key of the receiver; -1: before this window"""
        self.arrived: dict[int, float] = {}
        """when a message is there, likewise"""
        self.awaited: set[int] = set()
        """the messages that ranks wait for, likewise"""


class _Machine:
    """All ranks at work."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        stages = schedule.stages
        self.schedule, self.overlap = schedule, durations.overlap
        inputs, weights = per_stage(durations.input_grad, stages), per_stage(durations.weight_grad, stages)
        self.seconds = {
            Kind.FORWARD: per_stage(durations.forward, stages),
            Kind.BACKWARD: tuple(one + other for one, other in zip(inputs, weights, strict=True)),
            Kind.INPUT: inputs,
            Kind.WEIGHT: weights,
            Kind.UPDATE: per_stage(durations.update, stages),
            Kind.KEEP: (0.0,) * stages,
            Kind.DROP: (0.0,) * stages,
        }
        every = list(chain.from_iterable(schedule.lists))
        if (top := max((action.stage for action in every), default=0)) >= stages:
            raise ValueError(f"an action of stage {top} in a schedule of {stages} stages; add its home or leave it out")
        self.parts = 1 + max((action.part for action in every), default=0)
        self.factors = durations.slices or (1.0,) * self.parts
        if len(self.factors) < self.parts:
            raise ValueError(f"{len(self.factors)} factors for {self.parts} slices ({self.factors}); give one for each")
        self.is_lowered = any(action.kind in SENDS or action.kind in RECEIVES for action in every)
        self.onward = _Way(schedule, durations.send_forward, is_back=False)
        self.back = _Way(schedule, durations.send_backward, is_back=True)
        self.lanes: dict[tuple[int, int], float] = {}
        """when the lane from one rank to another is free again"""
        self.held: set[int] = set()
        """forward has run, backward has not"""
        self.halves: set[int] = set()
        """I has run, W has not"""
        self.awake = deque(range(schedule.ranks))
        self._take_over(every)

    def run(self) -> Timeline:
        lists = self.schedule.lists
        starts, ends = ([[0.0] * len(actions) for actions in lists] for _ in range(2))
        walks = [self._walk(rank, starts[rank], ends[rank]) for rank in range(len(lists))]
        wants: list[_Want | None] = [None] * len(lists)
        while self.awake:
            rank = self.awake.popleft()
            wants[rank] = next(walks[rank], None)
        if why := ", ".join(self._words(rank, want) for rank, want in enumerate(wants) if want):
            raise ValueError(f"the schedule cannot finish ({self.schedule.name}: {why}); change the order of its lists")
        return Timeline(
            name=self.schedule.name,
            homes=self.schedule.homes,
            lists=lists,
            starts=tuple(map(tuple, starts)),
            ends=tuple(map(tuple, ends)),
            note=self.schedule.note,
        )

    def _walk(self, rank: int, starts: list[float], ends: list[float]) -> Iterator[_Want]:
        """Runs a rank's list. Gives what it waits for whenever that is not there."""
        homes, factors, seconds, is_lowered = self.schedule.homes, self.factors, self.seconds, self.is_lowered
        onward, back, held, halves = self.onward, self.back, self.held, self.halves
        parts, stages, now = self.parts, len(homes), 0.0
        for position, action in enumerate(self.schedule.lists[rank]):
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
                        while key not in way.doors:
                            yield action, stage, "R" + way.letter
                        door, source = way.doors.pop(key), "S" + way.letter
                    else:
                        door, source = -1, way.letter
                    while key not in way.arrived:
                        way.awaited.add(key)
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
                        way.made.add(key)
                    else:
                        _, gone = self._send(way, rank, stage, key, now)
                        now = now if self.overlap else gone
            elif kind in VERSIONS:
                starts[position] = now
                ends[position] = now = now + seconds[kind][stage]
            elif kind in SENDS:
                way = onward if kind is Kind.SEND_FORWARD else back
                while key not in way.made:
                    yield action, stage, way.letter
                way.made.remove(key)
                starts[position], ends[position] = self._send(way, rank, stage, key, now)
                now = now if self.overlap else ends[position]
            else:
                (onward if kind is Kind.RECEIVE_FORWARD else back).doors[key] = position
                starts[position] = ends[position] = now

    def _send(self, way: _Way, rank: int, stage: int, key: int, now: float) -> tuple[float, float]:
        """When a message leaves and when it is there. Wakes who waits for it."""
        home, there = self.schedule.homes[stage + way.step], key + way.step
        lane = rank, home
        free = self.lanes.get(lane, 0.0)
        start = now if now > free else free
        self.lanes[lane] = way.arrived[there] = end = start + way.seconds[stage]
        if there in way.awaited:
            way.awaited.remove(there)
            self.awake.append(home)
        return start, end

    def _take_over(self, every: list[Action]) -> None:
        """What a window of an endless stream finds: microbatches whose forward ran before it, messages on their way."""
        first = min((action.index for action in every if action.kind is FORWARD), default=math.inf)
        old = {action[:4] for action in every if action.index < first and action.kind not in VERSIONS}
        for stage, kind, index, part in old:
            key = (index * self.parts + part) * self.schedule.stages + stage
            if kind is Kind.WEIGHT and (stage, Kind.INPUT, index, part) not in old:
                self.halves.add(key)
            if kind not in (Kind.BACKWARD, Kind.INPUT):
                continue
            self.held.add(key)
            if (stage, Kind.RECEIVE_BACKWARD, index, part) not in old:
                self.back.doors[key] = -1
            sent = {(stage + 1, kind, index, part) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.SEND_BACKWARD)}
            if not old & sent:
                self.back.arrived[key] = 0.0

    def _words(self, rank: int, want: _Want) -> str:
        action, stage, kind = want
        awaited = action._replace(stage=stage, kind=Kind(kind), version=NEWEST)
        # A stage that has its backward in two halves passes the gradient on after the first.
        half = awaited._replace(kind=INPUT)
        if kind == "B" and any(other[:4] == half[:4] for other in self.schedule.lists[self.schedule.homes[stage]]):
            awaited = half
        return f"rank {rank} at {action} waits for {awaited}"
