"""TeraPipe: the pipeline runs over slices of a sequence's tokens.

Digits are forwards of slices, letters their backwards; dots wait:

    rank 0  0123......ddccbbaa
    rank 1  .0123...ddccbbaa..
    rank 2  ..0123ddccbbaa....

In a causal model a token needs only those before it, so the next stage can start on the first slice of a sequence
while this one runs the second. Slices go forward in order and backward in reverse, because the gradients of a slice's
keys and values come from the slices behind it. Microbatches follow one another as in GPipe: with m microbatches of s
slices the bubble is that of GPipe with m x s microbatches, if all slices take equally long. slicer.py chooses their
lengths.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.actions import Action, Kind
from echelon.pipeline.schedule import Schedule, loop
from echelon.pipeline.schedules.sync_step import step


def build(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> Schedule:
    lists = [_list(rank, microbatches, slices) for rank in range(ranks)]
    return step("terapipe", loop(ranks), microbatches, lists, slices=slices)


def _list(rank: int, microbatches: int, slices: int) -> list[Action]:
    there, back = range(slices), range(slices - 1, -1, -1)
    forwards = [Action(rank, Kind.FORWARD, m, part) for m in range(microbatches) for part in there]
    return forwards + [Action(rank, Kind.BACKWARD, m, part) for m in range(microbatches) for part in back]


def bubble(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> Fraction:
    """With slices that take equally long."""
    return Fraction(ranks - 1, microbatches * slices + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int, slices: int = 1) -> tuple[int, ...]:
    """Counted in slices."""
    return (microbatches * slices,) * ranks
