"""Synchronous steps: a schedule whose every stage updates once, at the end.

[Note: leaving microbatches out]

Some schedules are defined from some number of microbatches up, or for multiples of some number. For others they are
built for the next number that suits them, and the actions of the surplus microbatches are left out:

    built for 3       0F0 0F1 0F2 0B0 0B1 0B2
    requested 2       0F0 0F1     0B0 0B1

An action depends on actions of its own microbatch and on those before it on its rank. So a schedule stays valid when a
microbatch is removed: no action waits for it, and no rank holds more activations than before.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule


def sync_schedule(
    name: str,
    rank_of_stage: tuple[int, ...],
    microbatches: int,
    rank_actions: Iterable[Iterable[Action]],
    *,
    scheduled: int = 0,
    slices: int = 1,
) -> Schedule:
    """A synchronous schedule: all actions but those of surplus microbatches, then one update per stage.

    `scheduled` is the number of microbatches that the actions were built for, if it is larger than `microbatches`.
    """
    actions_of_rank = [[action for action in actions if action.index < microbatches] for actions in rank_actions]
    for stage, rank in enumerate(rank_of_stage):
        actions_of_rank[rank].append(Action(stage, ActionKind.UPDATE, 1))
    surplus = f"the schedule for {scheduled} with {scheduled - microbatches} left out"
    return Schedule(
        name=name,
        rank_of_stage=rank_of_stage,
        microbatches=microbatches,
        rank_actions=tuple(map(tuple, actions_of_rank)),
        slices=slices,
        note=f"{microbatches} microbatches: {surplus}, so the bubble may be larger" if scheduled > microbatches else "",
    )
