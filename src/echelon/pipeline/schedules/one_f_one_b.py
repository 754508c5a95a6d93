"""1F1B (PipeDream-flush): one forward, one backward in turn, as soon as the first backward comes.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0  012....aa3bb.cc.dd
    rank 1  .01..aa2bb3cc.dd..
    rank 2  ..0aa1bb2cc3dd....

The bubble is GPipe's. But a rank starts a new microbatch only when an old one has left: rank r of d holds at most
d - r of them, however many microbatches a step has.
"""

from __future__ import annotations

from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.phases import Phase, phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    def phases(rank: int) -> list[Phase]:
        warmup = min(ranks - rank - 1, microbatches)  # as many forwards as there are ranks after this one
        return [(warmup, "F0"), (microbatches - warmup, "F0 B0"), (warmup, "B0")]

    return phased_schedule("1f1b", looped_placement(ranks), microbatches, phases)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(microbatches, ranks - rank) for rank in range(ranks))
