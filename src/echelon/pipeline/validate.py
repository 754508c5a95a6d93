"""Find every fault of a schedule before it runs.

`find_faults` takes schedules with and without sends and receives. It asks, one function each:

1. Is every action on the rank of its stage, and of a microbatch and a slice that exist?
2. Is there one forward and one backward (or I and W) per stage, microbatch and slice?
3. Does every action follow its dependencies, and is there no deadlock? (See [Note: dependencies] in dependencies.py.
   Receives block and sends do not, which is stricter than the runtime, which waits where a transfer is used.)
4. Is every weight version that an action uses the latest or stashed? Does an update use every gradient, and is every
   stashed version dropped? Has a synchronous step one update per stage?
5. Is everything sent once, received once, and in the same order on both ends?

A window of an asynchronous schedule depends on earlier windows: `join_windows` joins them, and `drained=False` allows
what a later window will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from echelon.pipeline.actions import COMPUTE, LATEST, SENDS, VERSIONS, Action, ActionKind
from echelon.pipeline.channels import Channel, TransferKey, incoming_channel, outgoing_channel, transfer_channel
from echelon.pipeline.dependencies import ActionResult, Dependencies, action_result, find_deadlock, is_lowered
from echelon.pipeline.schedule import Schedule

MAX_LISTED_MISSING = 20
"""missing actions that are listed one by one"""


class ScheduleFault(NamedTuple):
    """One fault and its place."""

    text: str
    rank: int = -1
    position: int = -1
    """the index in the rank's actions"""
    action: Action | None = None

    def __str__(self) -> str:
        if self.rank < 0:
            return self.text
        return f"rank {self.rank}, position {self.position} ({self.action}): {self.text}"


def fault_messages(schedule: Schedule, *, drained: bool = True) -> list[str]:
    """The faults of a schedule as text; empty if it can run."""
    return [str(fault) for fault in find_faults(schedule, drained=drained)]


def check_schedule(schedule: Schedule, *, drained: bool = True) -> None:
    """Raise ValueError with all faults."""
    if faults := fault_messages(schedule, drained=drained):
        head = f"the schedule cannot run ({schedule.name}, {len(faults)} faults); change its lists:"
        raise ValueError("\n  ".join([head, *faults]))


def find_faults(schedule: Schedule, *, drained: bool = True) -> list[ScheduleFault]:
    """All faults of a schedule. Without `drained`, a later window continues this one."""
    return [
        *_placement_faults(schedule),
        *_count_faults(schedule, drained),
        *_order_faults(schedule, drained),
        *_version_faults(schedule, drained),
        *(_transfer_faults(schedule) if is_lowered(schedule) else ()),
    ]


def join_windows(windows: Sequence[Schedule]) -> Schedule:
    """Join consecutive windows of one stream."""
    ranks = range(windows[0].ranks)
    lists = tuple(tuple(action for window in windows for action in window.rank_actions[rank]) for rank in ranks)
    return replace(windows[0], rank_actions=lists, microbatches=sum(window.microbatches for window in windows))


def _all_actions(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(schedule.rank_actions):
        for position, action in enumerate(actions):
            yield rank, position, action


def _placement_faults(schedule: Schedule) -> Iterator[ScheduleFault]:
    stages, homes = schedule.stages, schedule.rank_of_stage
    for stage, home in enumerate(homes):
        if home >= schedule.ranks:
            yield ScheduleFault(f"stage {stage} is on rank {home}, which has no list")
    for place in _all_actions(schedule):
        rank, _, (stage, kind, index, part, version) = place
        if stage >= stages:
            yield ScheduleFault(f"there is no stage {stage} (0 to {stages - 1})", *place)
        elif homes[stage] != rank:
            yield ScheduleFault(f"stage {stage} is on rank {homes[stage]}", *place)
        if kind in VERSIONS:
            if part:
                yield ScheduleFault("has a slice, and only microbatches have slices", *place)
        elif index >= schedule.microbatches:
            yield ScheduleFault(f"there is no microbatch {index} (0 to {schedule.microbatches - 1})", *place)
        elif part >= schedule.slices:
            yield ScheduleFault(f"there is no slice {part} (0 to {schedule.slices - 1})", *place)
        if version != LATEST and kind not in COMPUTE:
            yield ScheduleFault("has a version, and only F, B, I and W use weights", *place)


def _count_faults(schedule: Schedule, drained: bool) -> Iterator[ScheduleFault]:
    first_place: dict[tuple[int, ActionKind, int, int], tuple[int, int]] = {}
    for rank, position, action in _all_actions(schedule):
        if action.kind in COMPUTE:
            first = first_place.setdefault(action[:4], (rank, position))
            if first != (rank, position):
                text = f"is there twice (first on rank {first[0]}, position {first[1]})"
                yield ScheduleFault(text, rank, position, action)
    absent = 0
    for stage, index, part in _forward_keys(schedule):
        forward, backward, inputs, weights = (Action(stage, ActionKind(letter), index, part) for letter in "FBIW")
        has_forward, has_backward, has_inputs, has_weights = (
            action[:4] in first_place for action in (forward, backward, inputs, weights)
        )
        absent += not has_forward
        if absent > MAX_LISTED_MISSING:  # one action with a very large index implies all the others
            yield ScheduleFault("... and more are missing")
            return
        if not has_forward:
            yield ScheduleFault(f"{forward} is missing")
        if has_backward:
            if has_inputs or has_weights:
                yield ScheduleFault(f"{backward} is the whole backward, but one of its halves is there too")
        elif has_inputs:
            if not has_weights and drained:
                yield ScheduleFault(f"{inputs} is there without {weights}")
        elif has_weights:
            yield ScheduleFault(f"{weights} is there without {inputs}")
        elif drained:
            yield ScheduleFault(f"{backward} is missing (or {inputs} and {weights})")


def _forward_keys(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """(stage, microbatch, slice) of every forward, lazily: there may be more than memory holds."""
    for stage in range(schedule.stages):
        for index in range(schedule.microbatches):
            for part in range(schedule.slices):
                yield stage, index, part


def _order_faults(schedule: Schedule, drained: bool) -> Iterator[ScheduleFault]:
    results = [list(map(action_result, actions)) for actions in schedule.rank_actions]
    dependencies = Dependencies(schedule)
    wanted = [list(map(dependencies.for_action, actions)) for actions in schedule.rank_actions]
    made: dict[ActionResult, tuple[int, int]] = {}
    for rank, position, action in _all_actions(schedule):
        made.setdefault(action_result(action), (rank, position))
    excused: set[ActionResult] = set()  # results with a fault of their own do not count as deadlocks
    for rank, position, action in _all_actions(schedule):
        for need in wanted[rank][position]:
            home, place = made.get(need, (-1, -1))
            if home < 0:
                excused.add(need)
                if not drained and need[0] == "G":
                    yield ScheduleFault("comes before the backward that it needs", rank, position, action)
            elif home == rank and place >= position:
                excused.add(need)
                text = f"comes before {schedule.rank_actions[home][place]} (position {place}), which it needs"
                yield ScheduleFault(text, rank, position, action)
    waits = []
    for rank, (position, need) in sorted(find_deadlock(results, wanted, excused).items()):
        home, place = made[need]
        waits.append(
            f"rank {rank} at position {position} ({schedule.rank_actions[rank][position]}) waits for "
            f"{schedule.rank_actions[home][place]} (rank {home}, position {place})"
        )
    if waits:
        yield ScheduleFault(f"deadlock: {'; '.join(waits)}")


def _version_faults(schedule: Schedule, drained: bool) -> Iterator[ScheduleFault]:
    is_synchronous = True
    homes = schedule.rank_of_stage
    stages = [_StageVersions(stage) for stage in range(schedule.stages)]
    for rank, position, action in _all_actions(schedule):
        if (action.kind in COMPUTE or action.kind in VERSIONS) and homes[action.stage : action.stage + 1] == (rank,):
            is_synchronous &= action.version == LATEST
            yield from (ScheduleFault(text, rank, position, action) for text in stages[action.stage].apply(action))
    for stage in stages:
        if stage.gradients and drained:
            yield ScheduleFault(f"stage {stage.stage} has {stage.gradients} gradients that no update uses")
        if stage.stashed and drained:
            versions = _format_set(stage.stashed)
            yield ScheduleFault(f"stage {stage.stage} keeps versions to the end ({versions}); drop them")
        if stage.updates > 1 and is_synchronous:
            yield ScheduleFault(f"stage {stage.stage} has {stage.updates} updates; a synchronous step has one")


class _StageVersions:
    """The weight versions of a stage while its actions run."""

    def __init__(self, stage: int):
        self.stage = stage
        self.latest = self.updates = self.gradients = 0
        self.stashed: set[int] = set()
        self.version_of_forward: dict[tuple[int, int], int] = {}
        """by microbatch and slice"""

    def apply(self, action: Action) -> Iterator[str]:
        _, kind, index, _, _ = action
        if kind in COMPUTE:
            yield from self._use_version(action)
        elif kind is ActionKind.STASH:
            if index != self.latest or index in self.stashed:
                yield f"only a version in force can be kept, and once ({self._describe()})"
            self.stashed.add(index)
        elif kind is ActionKind.DROP_STASHED:
            if index not in self.stashed:
                yield f"only a version that is kept can be dropped ({self._describe()})"
            self.stashed.discard(index)
        elif kind is ActionKind.UPDATE:
            if index != self.latest + 1:
                yield f"is not the next version ({self._describe()})"
            if not self.gradients:
                yield "has no gradient since the update before"
            self.latest, self.gradients, self.updates = index, 0, self.updates + 1

    def _use_version(self, action: Action) -> Iterator[str]:
        _, kind, index, part, version = action
        version = self.latest if version == LATEST else version
        if version != self.latest and version not in self.stashed:
            yield f"version {version} is not there ({self._describe()})"
        if self.version_of_forward.setdefault((index, part), version) != version:
            yield f"uses version {version}, but its forward used {self.version_of_forward[index, part]}"
        self.gradients += kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)

    def _describe(self) -> str:
        return f"in force: {self.latest}, kept: {_format_set(self.stashed) or 'none'}"


def _format_set(values: set[int]) -> str:
    return " ".join(map(str, sorted(values)))


def _transfer_faults(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Compare both ends of every channel with the outputs and inputs of the compute actions."""
    made, sent, used, received = _ChannelEnds(), _ChannelEnds(), _ChannelEnds(), _ChannelEnds()
    homes, stages = schedule.rank_of_stage, schedule.stages
    for rank, position, action in _all_actions(schedule):
        if action.stage >= stages:
            continue
        if action.kind in COMPUTE:
            made.add(outgoing_channel(homes, action), action)
            used.add(incoming_channel(homes, action), action)
        elif action.kind not in VERSIONS:
            ends = sent if action.kind in SENDS else received
            if not ends.add(transfer_channel(action), action):
                yield ScheduleFault("is there twice", rank, position, action)
    for ends, wanted, verb in ((sent, made, "sent"), (received, used, "received")):
        for channel, message, action in wanted:
            if message not in ends.transfers(channel):
                yield ScheduleFault(f"the {_payload(channel)} of {action} is not {verb}")
        for channel, message, action in ends:
            if message not in wanted.transfers(channel):
                yield ScheduleFault(f"{action} has no {_payload(channel)} to be {verb}")
    for channel, queue in received.channels.items():
        source = sent.transfers(channel)
        # A transfer that only one end has is a fault of its own already.
        pairs = zip((m for m in source if m in queue), (m for m in queue if m in source), strict=True)
        if crossed := next(((there, here) for there, here in pairs if there != here), None):
            there, here = source[crossed[0]], queue[crossed[1]]
            yield ScheduleFault(f"{here} is received where {there} was sent; both ends of a channel need one order")


def _payload(channel: Channel) -> str:
    return "output" if channel[0] is ActionKind.SEND_FORWARD else "gradient"


class _ChannelEnds:
    """One end of every channel: its transfers in the order of the actions."""

    def __init__(self) -> None:
        self.channels: dict[Channel, dict[TransferKey, Action]] = {}

    def add(self, channel: Channel | None, action: Action) -> bool:
        """False if the transfer is there already."""
        if channel is None:
            return True
        queue, message = self.channels.setdefault(channel, {}), (action.index, action.slice_index)
        is_new = message not in queue
        queue.setdefault(message, action)
        return is_new

    def transfers(self, channel: Channel) -> dict[TransferKey, Action]:
        return self.channels.get(channel, {})

    def __iter__(self) -> Iterator[tuple[Channel, TransferKey, Action]]:
        for channel, queue in self.channels.items():
            for message, action in queue.items():
                yield channel, message, action
