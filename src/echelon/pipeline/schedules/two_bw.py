"""PipeDream-2BW: 1F1B without a flush, with two versions of the weights.

The actions and their times are PipeDream's (see pipedream.py), but the gradients of a batch of k microbatches
accumulate for one update. Batch t uses version max(0, t - 1) on every stage: by then the first stage has it, and only
one other version, the latest, exists.

    w(t+1) = w(t) - lr * grad f(w(max(t-1, 0)))

Stage 1 of 3, two batches of two (K stashes a version, D drops it, U makes the next):

    1F0@0 1F1@0 1B0@0 1F2@0 1B1@0 1K0 1U1 1F3@0 1B2@0 1B3@0 1D0 1U2

With fewer than d - 1 microbatches per batch, version t - 1 would be too late for batch t. The first stages then run at
most k forwards ahead. The rule holds and two versions suffice, but there is a bubble again.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.async_stream import WeightVersionRule, stream_schedule


def build(
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    first_microbatch: int = 0,
    drain: bool = True,
    microbatches_per_update: int = 0,
) -> Schedule:
    """`microbatches_per_update` of 0 makes one update per window."""
    batch, end = microbatches_per_update or microbatches, first_microbatch + microbatches
    if drain and end % batch:
        raise ValueError(
            f"a stream of 2bw ends inside a batch (microbatch {end}, batches of {batch}); "
            f"end it at a multiple of {batch}"
        )

    def rule(stage: int) -> WeightVersionRule:
        return WeightVersionRule(
            lag=min(ranks - 1 - stage, batch),
            version=lambda m: max(0, m // batch - 1),
            last_microbatch=lambda version: (version + 2) * batch - 1,
            microbatches_per_update=batch,
        )

    note = f"batches of fewer than {ranks - 1} microbatches ({batch}): stages wait for weights"
    note = note if batch < ranks - 1 else ""
    return stream_schedule("2bw", ranks, microbatches, rule, first_microbatch=first_microbatch, drain=drain, note=note)


def bubble(ranks: int, chunks: int, microbatches: int, microbatches_per_update: int = 0) -> Fraction | None:
    """Of a run of `microbatches` in all; None where it has several batches and they are too short."""
    is_short = 0 < microbatches_per_update < min(microbatches, ranks - 1)
    return None if is_short else Fraction(ranks - 1, microbatches + ranks - 1)


def in_flight(ranks: int, chunks: int, microbatches: int, microbatches_per_update: int = 0) -> tuple[int, ...]:
    """In a run of `microbatches` in all."""
    batch = microbatches_per_update or microbatches
    return tuple(min(microbatches, ranks - rank, batch + 1) for rank in range(ranks))


def weight_versions(ranks: int) -> tuple[int, ...]:
    return (2,) * ranks
