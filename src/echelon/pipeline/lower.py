"""`lower`: adds the messages between ranks to a schedule.

[Note: where messages stand]

    2F0 2SF0           a send follows what makes its content
    3RF1 3B0 3F1       a receive stands one action of compute ahead of its use

A receive starts to take a message; its use waits for it. So a transfer runs beside the compute in between.

1. Both ends of a channel have one order. Sends stand in the order in which the sender makes them, and receives in the
   same: where a rank uses a later message first, it takes the earlier ones with it.
2. A receive may go ahead of an action X only if X is not needed to make the message. A run in unit time decides: the
   maker of the message must start before X (where both start at once, it must be the shorter one). Then all that an
   action waits for starts before the action, so the lists have no deadlock even where a receive blocks.

Without sends and receives, what is left is the list as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.pipeline.actions import COMPUTE, Action
from echelon.pipeline.channels import RECEIVE, Channel, Message, into, out_of
from echelon.pipeline.dependencies import is_lowered
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.simulate import simulate

Begin = tuple[float, float]
"""when an action starts in the run in unit time, and how long it takes"""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its sends and receives; one that has them already stays as it is."""
    if is_lowered(schedule):
        return schedule
    begins = _begins(schedule)
    channels = _Channels(schedule, begins)
    lists = tuple(
        tuple(_list(schedule, channels, actions, mine)) for actions, mine in zip(schedule.lists, begins, strict=True)
    )
    return replace(schedule, lists=lists)


def _begins(schedule: Schedule) -> list[list[Begin]]:
    timeline = simulate(schedule)
    return [
        [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]


class _Channels:
    """What goes through every channel, in order, and how much of it has been received."""

    def __init__(self, schedule: Schedule, begins: list[list[Begin]]):
        self._homes = schedule.homes
        self._queues: dict[Channel, dict[Message, Begin]] = {}
        for actions, mine in zip(schedule.lists, begins, strict=True):
            for action, begin in zip(actions, mine, strict=True):
                if channel := out_of(schedule.homes, action):
                    self._queues.setdefault(channel, {})[action.index, action.part] = begin
        self._received: dict[Channel, set[Message]] = {}
        self._rest: dict[Channel, Iterator[Message]] = {key: iter(queue) for key, queue in self._queues.items()}

    def receives(self, action: Action) -> tuple[list[Action], Begin]:
        """The receives that an action needs, and when the last of their messages begins to be made."""
        early = (float("-inf"), 0.0)
        channel = into(self._homes, action)
        if channel is None:
            return [], early
        wanted, stage, kind = (action.index, action.part), action.stage, RECEIVE[channel[0]]
        queue = self._queues.get(channel, {})
        if wanted not in queue:
            # The window before this one sent it, so it comes before all that this one sends.
            return [Action(stage, kind, *wanted)], early
        received, found = self._received.setdefault(channel, set()), []
        while wanted not in received:
            message = next(self._rest[channel])
            received.add(message)
            found.append(Action(stage, kind, *message))
        return found, queue[wanted]


def _list(
    schedule: Schedule, channels: _Channels, actions: tuple[Action, ...], begins: list[Begin]
) -> Iterator[Action]:
    """A rank's list with its messages. See [Note: where messages stand]."""
    ahead: list[list[Action]] = [[] for _ in actions]
    """the receives in front of every action"""
    before: int | None = None
    for place, action in enumerate(actions):
        if action.kind not in COMPUTE:
            continue
        receives, made = channels.receives(action)
        front = before if before is not None and made < begins[before] else place
        ahead[front] += receives
        before = place
    for receives, action in zip(ahead, actions, strict=True):
        yield from receives
        yield action
        if channel := out_of(schedule.homes, action):
            yield Action(action.stage, channel[0], action.index, action.part)
