"""PipeDream with weight stashing: 1F1B without a flush, an update after every backward.

DRAWING

A stage's forward takes the newest weights that the stage has. Meanwhile other microbatches update them, so it keeps
("stashes") the version for the backward of the same microbatch. Stage s of d keeps d - s versions. Its microbatch m
uses version max(0, m - (d - 1 - s)): the stages of one microbatch use different versions.

    w(t+1) = w(t) - lr * grad f(w_1(t-d+1), ..., w_d(t))

Stage 1 of 3, four microbatches (K keeps a version, D drops it, U makes the next):

LIST
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.stream import Rule, stream


def build(ranks: int, chunks: int, microbatches: int, *, first: int = 0, drain: bool = True) -> Schedule:
    def rule(stage: int) -> Rule:
        lag = ranks - 1 - stage
        return Rule(lag=lag, version=lambda m: max(0, m - lag), last=lambda version: version + lag)

    return stream("pipedream", ranks, microbatches, rule, first=first, drain=drain)


def bubble(ranks: int, chunks: int, microbatches: int) -> Fraction:
    """Of a whole run of so many microbatches, which fills the pipeline once and drains it once."""
    return Fraction(ranks - 1, microbatches + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """In a whole run of so many microbatches."""
    return tuple(min(microbatches, ranks - rank) for rank in range(ranks))
