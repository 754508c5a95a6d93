"""ZB-H1: backward in two halves, of which the second fills the bubble.

Digits are forwards, small letters I, capitals W; dots wait:

    rank 0  012..aA3bBcCdD
    rank 1  .01.a2bA3cBdCD
    rank 2  ..0a1b2cA3dBCD

The stage before waits for I, the input gradient; W, the weight gradients, can wait. Forwards and Is run in the order of
1F1B. Rank r delays its Ws by r microbatches, so that the Is of the last ranks come early, and runs the rest of them at
the end, where 1F1B drains.

W uses the activations, so they are held until it is done. A rank with fewer warm-up forwards has more pending Ws: all
ranks hold d microbatches, which is the peak of 1F1B (there on rank 0 alone).
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.sync_step import sync_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    lists = [_rank_actions(rank, ranks - rank - 1, microbatches) for rank in range(ranks)]
    return sync_schedule("zb-h1", looped_placement(ranks), microbatches, lists)


def _rank_actions(rank: int, num_warmup: int, microbatches: int) -> list[Action]:
    forwards, weights = (
        [Action(rank, kind, m) for m in range(microbatches)] for kind in (ActionKind.FORWARD, ActionKind.WEIGHT_GRAD)
    )
    actions = forwards[:num_warmup]
    for m in range(microbatches):
        actions += forwards[num_warmup + m : num_warmup + m + 1]  # empty when the forwards are used up
        actions.append(Action(rank, ActionKind.INPUT_GRAD, m))
        if m >= rank:
            actions.append(weights[m - rank])
    return actions + weights[max(0, microbatches - rank) :]


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """(d-1) / (3m+d-1) from d microbatches up; fewer do not fill the way there and back."""
    makespan = max(3 * microbatches + ranks - 1, 2 * (microbatches + ranks) - 1)
    return 1 - Fraction(3 * microbatches, makespan)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return (min(microbatches, ranks),) * ranks
