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

from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.bubble_time import ZB_H1, unit_bubble
from echelon.pipeline.schedules.phases import Phase, phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    def phases(rank: int) -> list[Phase]:
        warmup, delay = min(ranks - rank - 1, microbatches), min(rank, microbatches)
        steady = microbatches - warmup
        return [
            (warmup, "F0"),
            (min(delay, steady), "F0 I0"),
            (steady - delay, "F0 I0 W0"),
            (delay - steady, "I0"),
            (min(warmup, microbatches - delay), "I0 W0"),
            (delay, "W0"),
        ]

    return phased_schedule("zb-h1", looped_placement(ranks), microbatches, phases)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """(d-1) / (3m+d-1) from d microbatches up; fewer do not fill the way there and back."""
    return unit_bubble(ZB_H1, ranks, chunks, microbatches)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return (min(microbatches, ranks),) * ranks
