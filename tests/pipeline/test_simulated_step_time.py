"""What a step takes is what the simulation says: stages that sleep, so that four ranks need no cores.

A machine that does other things makes steps longer, so this is a soak test, and the shortest of a few steps counts.
"""

from __future__ import annotations

import pytest

from bench import padded
from echelon.launch.rank_pool import RankPool
from echelon.pipeline.actions import ActionKind

UNIT = 0.1
"""seconds that a rank sleeps in F, in I and in W of a microbatch"""
TRIES = 4
BAR = 0.05


@pytest.mark.soak
@pytest.mark.parametrize("schedule", padded.SCHEDULES)
def test_a_step_takes_the_simulated_time(pool: RankPool, schedule: str) -> None:
    simulated = padded.simulated(schedule, UNIT)
    found: list[float] = []
    while len(found) < TRIES and (not found or min(found) > (1 + BAR) * simulated):
        found += pool.run(padded.measured, padded.RANKS, schedule, UNIT, 1)[0]
    assert simulated * (1 - BAR) <= min(found) <= simulated * (1 + BAR), [one / simulated for one in found]


def test_a_weight_gradient_sleeps_where_it_is_computed(pool: RankPool) -> None:
    """The padding itself: where backward has two halves, each of them takes its own pause and not the other's."""
    timeline = pool.run(padded.recorded, padded.RANKS, "zb-h1", UNIT / 4)[0]
    for rank in range(padded.RANKS):
        for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD):
            seconds = [end - start for action, start, end in timeline.spans(rank) if action.kind is kind]
            # Waiting for a message and for a core makes an action longer, but not every one of them.
            assert UNIT / 4 <= min(seconds) < UNIT / 2, (rank, kind, seconds)
