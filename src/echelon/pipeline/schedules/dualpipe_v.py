"""DualPipe-V: DualPipe's order on two chunks per rank that lie there and back (the "cut-in-half" form).

Digits are forwards, small letters B (two wide) or I, capitals W; dots wait:

    rank 0, stage 0  012....3...aa4...bb....cc..dDeE
    rank 0, stage 3  ...0aA1.bb2...cc3..dd4...ee....
    rank 1, stage 1  .0.1.2...aa3...bb4...cc..dd.e.E
    rank 1, stage 2  ..0.1.aa2...bb3...cc4..dd..e.E.

Its steady state pairs a forward of one direction with a backward of the other. DeepSeek's kernels run the two at once,
each hiding the other's all-to-all. Here, and in every picture, simulation and price of it, the two run one after the
other: sends between stages overlap, all-to-alls of experts do not. Backward is B where possible and split into I and
W where other ranks wait for it.

The eight phases of rank r of d, with chunk 0 on the way there and chunk 1 on the way back:

    1. F0                 d - r - 1 times two
    2. F0 F1              r + 1 times
    3. I1 W1 F1           d - r - 1 times
    4. F0 B1 F1 B0        the steady state, m - 2d + r + 1 times
    5.    B1 F1 B0        d - r - 1 times
    6.    B1    B0        r + 1 times; the second half of them are I1 and I0
    7. W I0               d - r - 1 times
    8. W                  r + 1 times

Fewer than 2d microbatches: the schedule for 2d, with the surplus left out (see [Note: leaving microbatches out] in
sync_step.py).
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule, v_placement
from echelon.pipeline.schedules.bubble_time import DUALPIPE_V, unit_bubble
from echelon.pipeline.schedules.phases import Phase, phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    scheduled = max(microbatches, 2 * ranks)

    def phases(rank: int) -> list[Phase]:
        behind = ranks - rank - 1
        return [
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W F1"),
            (scheduled - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            *((1, f"{'B' if turn <= rank else 'I'}{1 - turn % 2}") for turn in range(2 * (rank + 1))),
            (behind, "W I0"),
            (rank + 1, "W"),
        ]

    return phased_schedule("dualpipe-v", v_placement(ranks), microbatches, phases, scheduled=scheduled)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """(d-1) / (6m+d-1) from 2d microbatches up, as ZB-V; with fewer the pairs wait for each other."""
    return unit_bubble(DUALPIPE_V, ranks, chunks, microbatches)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(2 * ranks + 1, 2 * microbatches, microbatches + rank + 1) for rank in range(ranks))
