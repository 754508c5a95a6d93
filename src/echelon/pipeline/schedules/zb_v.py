"""ZB-V: backward in two halves and two chunks per rank in a V, so that no rank waits in between.

Digits are forwards, small letters I, capitals W; dots wait:

    rank 0, stage 0  012......3aA...bB...cCdD.
    rank 0, stage 3  ...0aA1bB...2cC..3dD.....
    rank 1, stage 1  .0.1...2aA...3bB...c.dC.D
    rank 1, stage 2  ..0.1aA...2bB...3cC.d..D.

Rank 0 has the first and the last stage: the loss is where the data comes in, and the first backward starts one way
earlier than in ZB-H1. From its first action to its last a rank is never idle; what is left of the bubble is that ranks
start one after the other, and end so. A rank holds 2d half chunks, which is the peak of 1F1B.

The phases of rank r of d, with chunk 0 on the way there and chunk 1 on the way back:

    1. F0            until the first microbatch comes back
    2. F1 F0         until the first backward comes
    3. F1 I1 W1      the last stages turn round
    4. F0 I0 W0 F1 I1 W1       the steady state
    5.    I0 W0 F1 I1 W1       no microbatch is left to start
    6. I0 I1         the last gradients first, others wait for them
    7. I0 W0, then all Ws that are left

Fewer than 2d - 1 microbatches: the schedule for 2d - 1, with the surplus left out (see [Note: leaving microbatches out]
in sync_step.py).
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule, v_placement
from echelon.pipeline.schedules.bubble_time import ZB_V, unit_bubble
from echelon.pipeline.schedules.phases import Phase, phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    scheduled = max(microbatches, 2 * ranks - 1)

    def phases(rank: int) -> list[Phase]:
        behind = ranks - rank
        return [
            (2 * behind - 1, "F0"),
            (rank, "F1 F0"),
            (behind, "F1 I1 W1"),
            (scheduled - ranks - behind + 1, "F0 I0 W0 F1 I1 W1"),
            (behind - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]

    return phased_schedule("zb-v", v_placement(ranks), microbatches, phases, scheduled=scheduled)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """(d-1) / (6m+d-1) from 3d/2 microbatches up; fewer do not fill the way there and back, twice."""
    return unit_bubble(ZB_V, ranks, chunks, microbatches)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(2 * ranks, 2 * microbatches, microbatches + rank + 1) for rank in range(ranks))
