"""Interleaved 1F1B (PTD-P): each rank owns several chunks of layers, so the pipeline fills with smaller pieces.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0, stage 0  01..2...3...aa.bb......ccdd
    rank 0, stage 2  ..01..aa.bb2..3...cc.dd....
    rank 1, stage 1  .01......2aa3bb......ccdd..
    rank 1, stage 3  ...0aa1bb......2cc3dd......

Microbatches go in groups of d, one for each rank. A group runs through the first chunk of every rank, then through the
second, and so on; by the time its last microbatch has left a chunk, its first one is back for the next. Then a forward
and a backward take turns, as in 1F1B. The bubble shrinks by the number of chunks, and a rank holds a few more
activations, each of a smaller piece.

A number of microbatches that is no multiple of d: the schedule for the next multiple, with the surplus left out (see
[Note: leaving microbatches out] in sync_step.py). Counting the turns of forward and backward without the surplus looks
simpler, but it can deadlock: 4 ranks, 3 chunks, 5 microbatches.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import zip_longest

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.bubble_time import INTERLEAVED, unit_bubble
from echelon.pipeline.schedules.sync_step import sync_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    scheduled = -(-microbatches // ranks) * ranks
    lists = [_rank_actions(rank, ranks, chunks, scheduled) for rank in range(ranks)]
    return sync_schedule("interleaved", looped_placement(ranks, chunks), microbatches, lists, scheduled=scheduled)


def _rank_actions(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    there = [chunk * ranks + rank for chunk in range(chunks)]
    forwards = [Action(stage, ActionKind.FORWARD, m) for group in groups for stage in there for m in group]
    backwards = [Action(stage, ActionKind.BACKWARD, m) for group in groups for stage in reversed(there) for m in group]
    warmup = _num_warmup(rank, ranks, chunks)
    pairs = zip_longest(forwards[warmup:], backwards)  # the forwards are used up first
    return forwards[:warmup] + [action for pair in pairs for action in pair if action]


def _num_warmup(rank: int, ranks: int, chunks: int) -> int:
    """Forwards before the first pair: all chunks but the last, then there and back to the last rank."""
    return (chunks - 1) * ranks + 2 * (ranks - rank - 1)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction | None:
    """None where more than d microbatches are no multiple of d."""
    # With fewer, the one group has holes, and all chunks but one wait for them, forward and backward.
    has_formula = microbatches < ranks or microbatches % ranks == 0
    return unit_bubble(INTERLEAVED, ranks, chunks, microbatches) if has_formula else None


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """The forwards up to the first backward; of those, the ones that are not left out."""
    return tuple(
        _count_requested(_num_warmup(rank, ranks, chunks) + 1, ranks, chunks, microbatches) for rank in range(ranks)
    )


def _count_requested(num_forwards: int, ranks: int, chunks: int, microbatches: int) -> int:
    """How many of a rank's first forwards are of microbatches that were asked for."""
    groups, rest = divmod(num_forwards, ranks * chunks)
    size = max(0, min(ranks, microbatches - groups * ranks))
    return min(groups * ranks, microbatches) * chunks + rest // ranks * size + min(rest % ranks, size)
