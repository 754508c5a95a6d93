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
from echelon.pipeline.channels import RECEIVE_KIND, Channel, TransferKey, incoming_channel, outgoing_channel
from echelon.pipeline.dependencies import is_lowered
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.simulate import simulate

StartTime = tuple[float, float]
"""when an action starts in the run in unit time, and how long it takes"""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its sends and receives; one that has them already stays as it is."""
    if is_lowered(schedule):
        return schedule
    begins = _start_times(schedule)
    channels = _ChannelQueues(schedule, begins)
    lists = tuple(
        tuple(_with_transfers(schedule, channels, actions, mine))
        for actions, mine in zip(schedule.rank_actions, begins, strict=True)
    )
    return replace(schedule, rank_actions=lists)


def _start_times(schedule: Schedule) -> list[list[StartTime]]:
    timeline = simulate(schedule)
    return [
        [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]


class _ChannelQueues:
    """What goes through every channel, in order, and how much of it has been received."""

    def __init__(self, schedule: Schedule, start_times: list[list[StartTime]]):
        self._rank_of_stage = schedule.rank_of_stage
        self._queues: dict[Channel, dict[TransferKey, StartTime]] = {}
        for actions, mine in zip(schedule.rank_actions, start_times, strict=True):
            for action, begin in zip(actions, mine, strict=True):
                if channel := outgoing_channel(schedule.rank_of_stage, action):
                    self._queues.setdefault(channel, {})[action.index, action.slice_index] = begin
        self._received: dict[Channel, set[TransferKey]] = {}
        self._remaining: dict[Channel, Iterator[TransferKey]] = {
            key: iter(queue) for key, queue in self._queues.items()
        }

    def required_receives(self, action: Action) -> tuple[list[Action], StartTime]:
        """The receives that an action needs, and when the last of their messages begins to be made."""
        early = (float("-inf"), 0.0)
        channel = incoming_channel(self._rank_of_stage, action)
        if channel is None:
            return [], early
        wanted, stage, kind = (action.index, action.slice_index), action.stage, RECEIVE_KIND[channel[0]]
        queue = self._queues.get(channel, {})
        if wanted not in queue:
            # The window before this one sent it, so it comes before all that this one sends.
            return [Action(stage, kind, *wanted)], early
        received, found = self._received.setdefault(channel, set()), []
        while wanted not in received:
            message = next(self._remaining[channel])
            received.add(message)
            found.append(Action(stage, kind, *message))
        return found, queue[wanted]


def _with_transfers(
    schedule: Schedule, channels: _ChannelQueues, actions: tuple[Action, ...], start_times: list[StartTime]
) -> Iterator[Action]:
    """A rank's list with its messages. See [Note: where messages stand]."""
    ahead: list[list[Action]] = [[] for _ in actions]
    """the receives in front of every action"""
    before: int | None = None
    for place, action in enumerate(actions):
        if action.kind not in COMPUTE:
            continue
        receives, made = channels.required_receives(action)
        front = before if before is not None and made < start_times[before] else place
        ahead[front] += receives
        before = place
    for receives, action in zip(ahead, actions, strict=True):
        yield from receives
        yield action
        if channel := outgoing_channel(schedule.rank_of_stage, action):
            yield Action(action.stage, channel[0], action.index, action.slice_index)
