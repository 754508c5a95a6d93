"""PipeDream with weight stashing: 1F1B without a flush, an update after every backward.

Digits are forwards, letters backwards of the microbatches 0, 1, ... and a, b, ...; dots wait:

    rank 0  012....aa3bb.cc.dd
    rank 1  .01..aa2bb3cc.dd..
    rank 2  ..0aa1bb2cc3dd....

A stage's forward uses the latest weights of the stage. Meanwhile other microbatches update them, so the stage stashes
the version for the backward of the same microbatch: stage s of d holds d - s versions, with the latest. Its microbatch
m uses version max(0, m - (d - 1 - s)), so the stages of one microbatch use different versions.

    w(t+1) = w(t) - lr * grad f(w_1(t-d+1), ..., w_d(t))

Stage 1 of 3, four microbatches (K stashes a version, D drops it, U makes the next):

    1F0@0 1F1@0 1B0@0 1K0 1U1 1F2@1 1B1@0 1D0 1K1 1U2 1F3@2 1B2@1 1D1 1K2 1U3 1B3@2 1D2 1U4
"""

from __future__ import annotations

from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.async_stream import WeightVersionRule, stream_schedule


def build(ranks: int, chunks: int, microbatches: int, *, first_microbatch: int = 0, drain: bool = True) -> Schedule:
    def rule(stage: int) -> WeightVersionRule:
        lag = ranks - 1 - stage
        return WeightVersionRule.with_delay(lag, delay=lag)

    return stream_schedule("pipedream", ranks, microbatches, rule, first_microbatch=first_microbatch, drain=drain)


def weight_versions(ranks: int) -> tuple[int, ...]:
    return tuple(ranks - rank for rank in range(ranks))
