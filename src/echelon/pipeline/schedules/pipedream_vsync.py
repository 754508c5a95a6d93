"""PipeDream with vertical sync: all stages use the same version of the weights for a microbatch.

The actions and their times are PipeDream's (see pipedream.py). But microbatch m uses version max(0, m - d + 1) on every
stage: the latest of the first stage. Later stages have newer weights by then and stash the old ones, so every stage
holds d versions, with the latest.

    w(t+1) = w(t) - lr * grad f(w_1(t-d+1), ..., w_d(t-d+1))

Stage 1 of 3, four microbatches (K stashes a version, D drops it, U makes the next):

    1F0@0 1F1@0 1B0@0 1K0 1U1 1F2@0 1B1@0 1K1 1U2 1F3@1 1B2@0 1D0 1K2 1U3 1D2 1B3@1 1D1 1U4
"""

from __future__ import annotations

from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.async_stream import WeightVersionRule, stream_schedule


def build(ranks: int, chunks: int, microbatches: int, *, first_microbatch: int = 0, drain: bool = True) -> Schedule:
    def rule(stage: int) -> WeightVersionRule:
        lag = ranks - 1 - stage
        return WeightVersionRule.with_delay(lag, delay=ranks - 1)

    return stream_schedule("pipedream-vsync", ranks, microbatches, rule, first_microbatch=first_microbatch, drain=drain)


def weight_versions(ranks: int) -> tuple[int, ...]:
    return (ranks,) * ranks
