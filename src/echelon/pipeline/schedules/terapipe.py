"""TeraPipe: the pipeline runs over slices of a sequence's tokens.

Digits are forwards of slices, letters their backwards; dots wait:

    rank 0  0123......ddccbbaa
    rank 1  .0123...ddccbbaa..
    rank 2  ..0123ddccbbaa....

In a causal model a token depends only on those before it, so the next stage can start on the first slice of a sequence
while this one runs the second. Slices go forward in order and backward in reverse, because the gradients of a slice's
keys and values come from the later slices. Microbatches follow one another as in GPipe: with m microbatches of s
slices the bubble is that of GPipe with m x s microbatches, if all slices take equally long. slices/slice_lengths.py
chooses their lengths.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.sync_step import sync_schedule


def build(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> Schedule:
    passes = ((ActionKind.FORWARD, range(slices)), (ActionKind.BACKWARD, range(slices)[::-1]))
    lists = [
        [Action(rank, kind, m, part) for kind, parts in passes for m in range(microbatches) for part in parts]
        for rank in range(ranks)
    ]
    return sync_schedule("terapipe", looped_placement(ranks), microbatches, lists, slices=slices)


def bubble(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> Fraction:
    """With slices that take equally long."""
    return Fraction(ranks - 1, microbatches * slices + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> tuple[int, ...]:
    """Counted in slices."""
    return (microbatches * slices,) * ranks
