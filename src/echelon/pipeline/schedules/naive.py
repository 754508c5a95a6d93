"""Naive layer split: consecutive layers on consecutive ranks, one microbatch at a time through all of them.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0  0......aa1......bb
    rank 1  .0...aa...1...bb..
    rank 2  ..0aa......1bb....

No two ranks are busy at once, so d ranks are as fast as one. It is what the other schedules improve on.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.phases import phased_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    return phased_schedule("naive", looped_placement(ranks), microbatches, lambda _: [(microbatches, "F0 B0")])


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """Each rank works one d-th of the time."""
    return 1 - Fraction(1, ranks)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return (1,) * ranks
