"""GPipe: all microbatches forward, then all backward.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0  0123......aabbccdd
    rank 1  .0123...aabbccdd..
    rank 2  ..0123aabbccdd....

A rank waits while the pipeline fills and while it drains, d - 1 actions each way, and holds the activations of all
microbatches in between.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.phases import phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    return phased_schedule(
        "gpipe", looped_placement(ranks), microbatches, lambda _: [(microbatches, "F0"), (microbatches, "B0")]
    )


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    return Fraction(ranks - 1, microbatches + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return (microbatches,) * ranks
