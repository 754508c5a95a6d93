"""`lower`: add sends and receives to a schedule.

[Note: positions of sends and receives]

    2F0 2SF0           a send follows the action that produces it
    3RF1 3B0 3F1       a receive is posted one compute action ahead of its use

A receive starts a transfer; its use waits for it. So the transfer overlaps with the compute in between.

1. Both ends of a channel have the same order: that of the sender. If a rank uses a later transfer first, it receives
   the earlier ones before it.
2. A receive may precede an action X only if the transfer does not depend on X. A simulation in unit time decides: the
   action that produces the transfer must start before X (if both start at once, it must be the shorter one). Then all
   that an action waits for starts before the action, so there is no deadlock even if receives block.

Removing the sends and receives gives back the original schedule.
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
"""(start, duration) of an action in the simulation in unit time"""


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its sends and receives; a lowered one is returned unchanged."""
    if is_lowered(schedule):
        return schedule
    timeline = simulate(schedule)
    start_times = [
        [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]
    channels = _ChannelQueues(schedule, start_times)
    lists = tuple(
        tuple(_with_transfers(schedule, channels, actions, starts))
        for actions, starts in zip(schedule.rank_actions, start_times, strict=True)
    )
    return replace(schedule, rank_actions=lists)


class _ChannelQueues:
    """The transfers of every channel in order, and those already received."""

    def __init__(self, schedule: Schedule, start_times: list[list[StartTime]]):
        self._rank_of_stage = schedule.rank_of_stage
        self._queues: dict[Channel, dict[TransferKey, StartTime]] = {}
        for actions, starts in zip(schedule.rank_actions, start_times, strict=True):
            for action, start in zip(actions, starts, strict=True):
                if channel := outgoing_channel(schedule.rank_of_stage, action):
                    self._queues.setdefault(channel, {})[action.index, action.slice_index] = start
        self._received: dict[Channel, set[TransferKey]] = {}
        self._remaining = {channel: iter(queue) for channel, queue in self._queues.items()}

    def required_receives(self, action: Action) -> tuple[list[Action], StartTime]:
        """The receives that an action depends on, and the start of the action that produces the last of them."""
        early = (float("-inf"), 0.0)
        channel = incoming_channel(self._rank_of_stage, action)
        if channel is None:
            return [], early
        wanted, stage, kind = (action.index, action.slice_index), action.stage, RECEIVE_KIND[channel[0]]
        queue = self._queues.get(channel, {})
        if wanted not in queue:
            # The previous window sent it, before all transfers of this one.
            return [Action(stage, kind, *wanted)], early
        received, receives = self._received.setdefault(channel, set()), []
        while wanted not in received:
            transfer = next(self._remaining[channel])
            received.add(transfer)
            receives.append(Action(stage, kind, *transfer))
        return receives, queue[wanted]


def _with_transfers(
    schedule: Schedule, channels: _ChannelQueues, actions: tuple[Action, ...], start_times: list[StartTime]
) -> Iterator[Action]:
    """A rank's actions with its sends and receives. See [Note: positions of sends and receives]."""
    ahead: list[list[Action]] = [[] for _ in actions]
    """the receives before each action"""
    before: int | None = None
    for place, action in enumerate(actions):
        if action.kind in COMPUTE:
            receives, made = channels.required_receives(action)
            ahead[before if before is not None and made < start_times[before] else place] += receives
            before = place
    for receives, action in zip(ahead, actions, strict=True):
        yield from receives
        yield action
        if channel := outgoing_channel(schedule.rank_of_stage, action):
            yield Action(action.stage, channel[0], action.index, action.slice_index)
