"""Schedules as the papers write them: for each rank, phases that repeat a pattern of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.sync_step import sync_schedule

Phase = tuple[int, str]
"""how often a pattern repeats (not at all if the number is negative), and the pattern"""


def phased_schedule(
    name: str,
    rank_of_stage: tuple[int, ...],
    microbatches: int,
    phases: Callable[[int], list[Phase]],
    *,
    scheduled: int = 0,
) -> Schedule:
    """A synchronous schedule from the phases of every rank, written for `scheduled` microbatches or more.

    A pattern such as `F0 I1 W1` names kinds and chunks of the rank. Each action takes the next microbatch of its chunk;
    `W1` is the oldest pending weight gradient of chunk 1, `W` the oldest of all chunks.
    """
    ranks = range(max(rank_of_stage) + 1)
    stages_on = [[stage for stage, home in enumerate(rank_of_stage) if home == rank] for rank in ranks]
    lists = [_repeat_patterns(stages_on[rank], phases(rank)) for rank in ranks]
    return sync_schedule(name, rank_of_stage, microbatches, lists, scheduled=scheduled)


def _repeat_patterns(stages: list[int], phases: list[Phase]) -> list[Action]:
    actions: list[Action] = []
    pending_weight_grads: list[Action] = []
    next_microbatch: Counter[tuple[int, bool]] = Counter()
    """by stage and by whether it is backward"""
    for word in (word for times, pattern in phases for word in pattern.split() * times):
        kind, chunk = ActionKind(word[0]), word[1:]
        if kind is ActionKind.WEIGHT_GRAD:
            wanted = (stages[int(chunk)],) if chunk else stages
            oldest = next(place for place, action in enumerate(pending_weight_grads) if action.stage in wanted)
            actions.append(pending_weight_grads.pop(oldest))
            continue
        stage = stages[int(chunk)]
        key = (stage, kind is not ActionKind.FORWARD)
        actions.append(Action(stage, kind, next_microbatch[key]))
        if kind is ActionKind.INPUT_GRAD:
            pending_weight_grads.append(Action(stage, ActionKind.WEIGHT_GRAD, next_microbatch[key]))
        next_microbatch[key] += 1
    return actions
