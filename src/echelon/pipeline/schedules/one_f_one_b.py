"""1F1B (PipeDream-flush): one forward, one backward in turn, as soon as the first backward comes.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0  012....aa3bb.cc.dd
    rank 1  .01..aa2bb3cc.dd..
    rank 2  ..0aa1bb2cc3dd....

The bubble is GPipe's. But a rank starts a new microbatch only when an old one has left: rank r of d holds at most
d - r of them, however many microbatches a step has.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement
from echelon.pipeline.schedules.sync_step import sync_schedule


def build(ranks: int, chunks: int, microbatches: int) -> Schedule:
    lists = [_rank_actions(rank, ranks - rank - 1, microbatches) for rank in range(ranks)]
    return sync_schedule("1f1b", looped_placement(ranks), microbatches, lists)


def _rank_actions(rank: int, num_warmup: int, microbatches: int) -> list[Action]:
    """`num_warmup` forwards come before the first pair: as many as there are ranks after this one."""
    forwards = [Action(rank, ActionKind.FORWARD, m) for m in range(microbatches)]
    actions = forwards[:num_warmup]
    for m in range(microbatches):
        actions += forwards[num_warmup + m : num_warmup + m + 1]  # empty when the forwards are used up
        actions.append(Action(rank, ActionKind.BACKWARD, m))
    return actions


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    return Fraction(ranks - 1, microbatches + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(microbatches, ranks - rank) for rank in range(ranks))
