"""Every fault of a schedule, before anything runs.

`faults` works on lists with and without messages. It asks, one function each:

1. Is every action on the rank of its stage, and of a microbatch and a slice that are there?
2. Is every forward there once, and every backward once, whole or in halves?
3. Does every action come after what it needs, and do the lists reach their end? (See [Note: needs] in order.py.
   Receives block and sends do not, which is stricter than a runtime that waits only where a message is used.)
4. Does every action find the version of the weights that it uses, in force or kept? Does every gradient get into an
   update, and is every version that was kept dropped? Has a synchronous step one update per stage?
5. Is everything sent once, received once, and in the same order on both ends?

A window of an asynchronous schedule needs the windows before it: `joined` puts them together, and `drained=False`
allows what a later window will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from echelon.pipeline.actions import COMPUTE, NEWEST, SENDS, VERSIONS, Action, Kind
from echelon.pipeline.channels import Channel, Message, into, out_of, through
from echelon.pipeline.dependencies import BACKWARD, FORWARD, INPUT, WEIGHT, Needs, Result, is_lowered, result, stuck
from echelon.pipeline.schedule import Schedule

MANY = 20
"""missing actions that are told one by one"""


class Fault(NamedTuple):
    """One thing that is wrong, and where."""

    text: str
    rank: int = -1
    position: int = -1
    """the place in the rank's list, from 0"""
    action: Action | None = None

    def __str__(self) -> str:
        if self.rank < 0:
            return self.text
        return f"rank {self.rank}, position {self.position} ({self.action}): {self.text}"


def faults(schedule: Schedule, *, drained: bool = True) -> list[str]:
    """Everything that is wrong with a schedule, for people; empty where it can run."""
    return [str(fault) for fault in find(schedule, drained=drained)]


def check(schedule: Schedule, *, drained: bool = True) -> None:
    """Raises ValueError with all faults."""
    if found := faults(schedule, drained=drained):
        head = f"the schedule cannot run ({schedule.name}, {len(found)} faults); change its lists:"
        raise ValueError("\n  ".join([head, *found]))


def find(schedule: Schedule, *, drained: bool = True) -> list[Fault]:
    """Everything that is wrong with a schedule. Without `drained`, a later window goes on where this one ends."""
    return [
        *_misplaced(schedule),
        *_uncounted(schedule, drained),
        *_disordered(schedule, drained),
        *_weights(schedule, drained),
        *(_messages(schedule) if is_lowered(schedule) else ()),
    ]


def joined(windows: Sequence[Schedule]) -> Schedule:
    """Consecutive windows of one stream as one."""
    ranks = range(windows[0].ranks)
    lists = tuple(tuple(action for window in windows for action in window.lists[rank]) for rank in ranks)
    return replace(windows[0], lists=lists, microbatches=sum(window.microbatches for window in windows))


def _every(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(schedule.lists):
        for position, action in enumerate(actions):
            yield rank, position, action


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    stages, homes = schedule.stages, schedule.homes
    for stage, home in enumerate(homes):
        if home >= schedule.ranks:
            yield Fault(f"stage {stage} is on rank {home}, which has no list")
    for rank, position, action in _every(schedule):
        stage, kind, index, part, version = action
        if stage >= stages:
            yield Fault(f"there is no stage {stage} (0 to {stages - 1})", rank, position, action)
        elif homes[stage] != rank:
            yield Fault(f"stage {stage} is on rank {homes[stage]}", rank, position, action)
        if kind in VERSIONS:
            if part:
                yield Fault("has a slice, and only microbatches have slices", rank, position, action)
        elif index >= schedule.microbatches:
            yield Fault(f"there is no microbatch {index} (0 to {schedule.microbatches - 1})", rank, position, action)
        elif part >= schedule.slices:
            yield Fault(f"there is no slice {part} (0 to {schedule.slices - 1})", rank, position, action)
        if version != NEWEST and kind not in COMPUTE:
            yield Fault("has a version, and only F, B, I and W use weights", rank, position, action)


def _uncounted(schedule: Schedule, drained: bool) -> Iterator[Fault]:
    seen: dict[Kind, dict[tuple[int, int, int], tuple[int, int]]] = {FORWARD: {}, BACKWARD: {}, INPUT: {}, WEIGHT: {}}
    for rank, position, action in _every(schedule):
        stage, kind, index, part, _ = action
        if kind in COMPUTE:
            first = seen[kind].setdefault((stage, index, part), (rank, position))
            if first != (rank, position):
                yield Fault(f"is there twice (first on rank {first[0]}, position {first[1]})", rank, position, action)
    forward, whole, inputs, weights = (seen[kind] for kind in seen)
    absent = 0
    for key in _keys(schedule):
        absent += key not in forward
        if absent > MANY:  # a single action of a very large number asks for all the others
            yield Fault("... and more are missing")
            return
        if key not in forward:
            yield Fault(f"{_text(FORWARD, key)} is missing")
        if key in whole:
            if key in inputs or key in weights:
                yield Fault(f"{_text(BACKWARD, key)} is the whole backward, but one of its halves is there too")
        elif key in inputs:
            if key not in weights and drained:
                yield Fault(f"{_text(INPUT, key)} is there without {_text(WEIGHT, key)}")
        elif key in weights:
            yield Fault(f"{_text(WEIGHT, key)} is there without {_text(INPUT, key)}")
        elif drained:
            yield Fault(f"{_text(BACKWARD, key)} is missing (or {_text(INPUT, key)} and {_text(WEIGHT, key)})")


def _keys(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """(stage, microbatch, slice) of every forward; one by one, because there may be more than memory holds."""
    for stage in range(schedule.stages):
        for index in range(schedule.microbatches):
            for part in range(schedule.slices):
                yield stage, index, part


def _text(kind: Kind, key: tuple[int, int, int]) -> str:
    return str(Action(key[0], kind, key[1], key[2]))


def _disordered(schedule: Schedule, drained: bool) -> Iterator[Fault]:
    results = [[result(action) for action in actions] for actions in schedule.lists]
    needs = Needs(schedule)
    wanted = [[needs.of(action) for action in actions] for actions in schedule.lists]
    made: dict[Result, tuple[int, int]] = {}
    for rank, mine in enumerate(results):
        for position, what in enumerate(mine):
            made.setdefault(what, (rank, position))
    excused: set[Result] = set()  # what has a fault of its own is no reason for a deadlock
    for rank, position, action in _every(schedule):
        for need in wanted[rank][position]:
            home, place = made.get(need, (-1, -1))
            if home < 0:
                excused.add(need)
                if not drained and need[0] == "G":
                    yield Fault("comes before the backward that it needs", rank, position, action)
            elif home == rank and place >= position:
                excused.add(need)
                text = f"comes before {schedule.lists[home][place]} (position {place}), which it needs"
                yield Fault(text, rank, position, action)
    stopped = stuck(results, wanted, excused)
    if stopped:
        waits = []
        for rank, (position, need) in sorted(stopped.items()):
            home, place = made[need]
            waits.append(
                f"rank {rank} at position {position} ({schedule.lists[rank][position]}) waits for "
                f"{schedule.lists[home][place]} (rank {home}, position {place})"
            )
        yield Fault(f"deadlock: {'; '.join(waits)}")


def _weights(schedule: Schedule, drained: bool) -> Iterator[Fault]:
    is_synchronous = True
    homes = schedule.homes
    stages = [_Weights(stage) for stage in range(schedule.stages)]
    for rank, position, action in _every(schedule):
        if (action.kind in COMPUTE or action.kind in VERSIONS) and homes[action.stage : action.stage + 1] == (rank,):
            is_synchronous &= action.version == NEWEST
            yield from (Fault(text, rank, position, action) for text in stages[action.stage].take(action))
    for stage in stages:
        if stage.gradients and drained:
            yield Fault(f"stage {stage.stage} has {stage.gradients} gradients that no update uses")
        if stage.kept and drained:
            yield Fault(f"stage {stage.stage} keeps versions to the end ({_numbers(stage.kept)}); drop them")
        if stage.updates > 1 and is_synchronous:
            yield Fault(f"stage {stage.stage} has {stage.updates} updates; a synchronous step has one")


class _Weights:
    """The versions of a stage's weights while its actions run."""

    def __init__(self, stage: int):
        self.stage = stage
        self.in_force = self.updates = self.gradients = 0
        self.kept: set[int] = set()
        self.used: dict[tuple[int, int], int] = {}
        """the version that a forward used"""

    def take(self, action: Action) -> Iterator[str]:
        _, kind, index, _, _ = action
        if kind in COMPUTE:
            yield from self._use(action)
        elif kind is Kind.KEEP:
            if index != self.in_force or index in self.kept:
                yield f"only a version in force can be kept, and once ({self._there()})"
            self.kept.add(index)
        elif kind is Kind.DROP:
            if index not in self.kept:
                yield f"only a version that is kept can be dropped ({self._there()})"
            self.kept.discard(index)
        elif kind is Kind.UPDATE:
            if index != self.in_force + 1:
                yield f"is not the next version ({self._there()})"
            if not self.gradients:
                yield "has no gradient since the update before"
            self.in_force, self.gradients, self.updates = index, 0, self.updates + 1

    def _use(self, action: Action) -> Iterator[str]:
        _, kind, index, part, version = action
        version = self.in_force if version == NEWEST else version
        if version != self.in_force and version not in self.kept:
            yield f"version {version} is not there ({self._there()})"
        if self.used.setdefault((index, part), version) != version:
            yield f"uses version {version}, but its forward used {self.used[index, part]}"
        self.gradients += kind is BACKWARD or kind is WEIGHT

    def _there(self) -> str:
        return f"in force: {self.in_force}, kept: {_numbers(self.kept) or 'none'}"


def _numbers(values: set[int]) -> str:
    return " ".join(map(str, sorted(values)))


def _messages(schedule: Schedule) -> Iterator[Fault]:
    """Both ends of every channel, against what the actions beside them make and use."""
    made, sent, used, received = _Ends(), _Ends(), _Ends(), _Ends()
    homes, stages = schedule.homes, schedule.stages
    for rank, position, action in _every(schedule):
        if action.stage >= stages:
            continue
        if action.kind in COMPUTE:
            made.add(out_of(homes, action), action)
            used.add(into(homes, action), action)
        elif action.kind not in VERSIONS:
            ends = sent if action.kind in SENDS else received
            if not ends.add(through(action), action):
                yield Fault("is there twice", rank, position, action)
    for ends, wanted, verb in ((sent, made, "sent"), (received, used, "received")):
        for channel, message, action in wanted:
            if message not in ends.of(channel):
                yield Fault(f"the {_what(channel)} of {action} is not {verb}")
        for channel, message, action in ends:
            if message not in wanted.of(channel):
                yield Fault(f"{action} has no {_what(channel)} to be {verb}")
    for channel, queue in received.channels.items():
        source = sent.of(channel)
        # What only one end has is a fault of its own already.
        pairs = zip((m for m in source if m in queue), (m for m in queue if m in source), strict=True)
        if crossed := next(((there, here) for there, here in pairs if there != here), None):
            there, here = source[crossed[0]], queue[crossed[1]]
            yield Fault(f"{here} is received where {there} was sent; both ends of a channel need one order")


def _what(channel: Channel) -> str:
    return "output" if channel[0] is Kind.SEND_FORWARD else "gradient"


class _Ends:
    """One end of every channel: its messages in the order of the list, each with its action."""

    def __init__(self) -> None:
        self.channels: dict[Channel, dict[Message, Action]] = {}

    def add(self, channel: Channel | None, action: Action) -> bool:
        """False where the message is there already."""
        if channel is None:
            return True
        queue, message = self.channels.setdefault(channel, {}), (action.index, action.part)
        is_new = message not in queue
        queue.setdefault(message, action)
        return is_new

    def of(self, channel: Channel) -> dict[Message, Action]:
        return self.channels.get(channel, {})

    def __iter__(self) -> Iterator[tuple[Channel, Message, Action]]:
        for channel, queue in self.channels.items():
            for message, action in queue.items():
                yield channel, message, action
