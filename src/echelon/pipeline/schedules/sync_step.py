"""What all synchronous schedules share: the updates at the end of a step, and microbatches that are left out.

[Note: leaving microbatches out]

Some schedules are defined from some number of microbatches up, or for multiples of some number. For others they are
written for the next number that suits them, and the actions of the surplus microbatches are left out:

    written for 3     0F0 0F1 0F2 0B0 0B1 0B2
    asked for 2       0F0 0F1     0B0 0B1

An action waits for actions of its own microbatch and for those before it in its list, and for nothing else. So a list
stays right when a whole microbatch leaves: nobody waits for what is gone, and nobody holds more than before.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule


def truncation_note(requested: int, scheduled: int) -> str:
    """The note of a schedule that was written for more microbatches than were asked for."""
    if requested == scheduled:
        return ""
    return f"{requested} microbatches: the schedule for {scheduled} with {scheduled - requested} left out, so the bubble may be larger"


def sync_schedule(
    name: str,
    rank_of_stage: tuple[int, ...],
    microbatches: int,
    rank_actions: Iterable[Iterable[Action]],
    *,
    slices: int = 1,
    note: str = "",
) -> Schedule:
    """A synchronous schedule: every list without surplus microbatches, then one update for each stage of its rank."""
    kept = [[action for action in actions if action.index < microbatches] for actions in rank_actions]
    for stage, home in enumerate(rank_of_stage):
        kept[home].append(Action(stage, ActionKind.UPDATE, 1))
    whole = tuple(tuple(actions) for actions in kept)
    return Schedule(
        name=name, rank_of_stage=rank_of_stage, microbatches=microbatches, rank_actions=whole, slices=slices, note=note
    )
