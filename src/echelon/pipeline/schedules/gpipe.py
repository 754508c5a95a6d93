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

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.sync_step import sync_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    both = (ActionKind.FORWARD, ActionKind.BACKWARD)
    lists = [[Action(rank, kind, m) for kind in both for m in range(microbatches)] for rank in range(ranks)]
    return sync_schedule("gpipe", looped_placement(ranks), microbatches, lists)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    return Fraction(ranks - 1, microbatches + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return (microbatches,) * ranks
