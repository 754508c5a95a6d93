"""What an action depends on and what it produces, and the search for deadlocks.

[Note: dependencies]

    F        F of the stage before; F of the slice before
    B, I     its own F; B or I of the stage after; B or I of the slice after
    W        its own I
    SF, SB   the F, B or I that produces what is sent
    RF, RB   the SF or SB of the other rank
    U K D    nothing but the actions before them

In a lowered schedule, F and B depend on the receive instead of another rank's action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise

from echelon.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, RECEIVES, SENDS, WEIGHT_GRAD, Action, ActionKind
from echelon.pipeline.schedule import Schedule

ActionResult = tuple[str, int, int, int]
"""what an action produces: its kind (G, a gradient, for B and I alike), stage, microbatch and slice"""


def is_lowered(schedule: Schedule) -> bool:
    """Whether the schedule has sends and receives."""
    transfers = SENDS | RECEIVES
    return any(action.kind in transfers for actions in schedule.rank_actions for action in actions)


def action_result(action: Action) -> ActionResult:
    stage, kind, index, part, _ = action
    return ("G" if kind is BACKWARD or kind is INPUT_GRAD else kind.value, stage, index, part)


class Dependencies:
    """The dependencies of a schedule's actions. See [Note: dependencies]."""

    def __init__(self, schedule: Schedule):
        self.last_stage, self.last_slice = schedule.stages - 1, schedule.slices - 1
        has_transfers = is_lowered(schedule)
        self._by_transfer = [has_transfers and rank != other for rank, other in pairwise(schedule.rank_of_stage)]
        """for each stage but the last, whether a transfer leads to the next stage"""

    def for_action(self, action: Action) -> list[ActionResult]:
        stage, kind, index, part, _ = action
        needs: list[ActionResult] = []
        if stage > self.last_stage:
            return needs  # no such stage: `validate` reports it
        if kind is FORWARD:
            if part:
                needs.append(("F", stage, index, part - 1))
            if stage:
                is_received = self._by_transfer[stage - 1]
                needs.append(("RF", stage, index, part) if is_received else ("F", stage - 1, index, part))
        elif kind is BACKWARD or kind is INPUT_GRAD:
            needs.append(("F", stage, index, part))
            if part < self.last_slice:
                needs.append(("G", stage, index, part + 1))
            if stage < self.last_stage:
                is_received = self._by_transfer[stage]
                needs.append(("RB", stage, index, part) if is_received else ("G", stage + 1, index, part))
        elif kind is WEIGHT_GRAD or kind is ActionKind.SEND_BACKWARD:
            needs.append(("G", stage, index, part))
        elif kind is ActionKind.SEND_FORWARD:
            needs.append(("F", stage, index, part))
        elif kind is ActionKind.RECEIVE_FORWARD:
            needs.append(("SF", stage - 1, index, part))
        elif kind is ActionKind.RECEIVE_BACKWARD:
            needs.append(("SB", stage + 1, index, part))
        return needs


def find_deadlock(
    results: Sequence[Sequence[ActionResult]],
    dependencies: Sequence[Sequence[list[ActionResult]]],
    available: Collection[ActionResult] = (),
) -> dict[int, tuple[int, ActionResult]]:
    """Run all ranks until none can continue; for each rank that is stuck, its position and what it waits for.

    A rank runs its actions in order and stops at an unmet dependency: receives block, sends do not. `available`
    results exist from the start.
    """
    met = set(available)
    places = [0] * len(results)
    waiting: dict[ActionResult, list[int]] = {}
    stopped: dict[int, tuple[int, ActionResult]] = {}
    awake = deque(range(len(results)))
    while awake:
        rank = awake.popleft()
        stopped.pop(rank, None)
        mine, wanted = results[rank], dependencies[rank]
        for place in range(places[rank], len(mine)):
            missing = next((need for need in wanted[place] if need not in met), None)
            if missing is not None:
                places[rank], stopped[rank] = place, (place, missing)
                waiting.setdefault(missing, []).append(rank)
                break
            met.add(mine[place])
            awake.extend(waiting.pop(mine[place], ()))
    return stopped
