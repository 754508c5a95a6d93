"""A step's real timeline, over the plan of the same step.

The plan is simulated with the mean durations that were measured, so that what is left between the two is waiting and
messages, not a wrong guess at how long a stage takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from echelon.layout.layout import ASYNCHRONOUS
from echelon.pipeline.actions import Action, Kind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline

Spans = Sequence[Sequence[tuple[str, float, float]]]
"""of every rank of pp: (an action's text, its start, its end), in seconds of one clock"""


def timelines(schedule: Schedule, spans: Spans) -> tuple[Timeline, Timeline]:
    """(planned, measured) of one step."""
    if schedule.name not in ASYNCHRONOUS:
        # Whoever holds the optimizer makes a synchronous step's updates after it. What the runtime took to pass them by
        # is not theirs.
        spans = [
            [(text, start, start if Action.parse(text).kind is Kind.UPDATE else end) for text, start, end in rank]
            for rank in spans
        ]
    measured = Timeline.from_spans(schedule.name, schedule.homes, spans, note=schedule.note)
    return simulate(schedule, durations(schedule.stages, spans)), measured


def durations(stages: int, spans: Spans) -> Durations:
    """The mean seconds of each kind of action on each stage."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for rank in spans:
        for text, start, end in rank:
            action = Action.parse(text)
            found.setdefault((action.kind, action.stage), []).append(end - start)
    means = {key: fmean(values) for key, values in found.items()}

    def per_stage(kind: Kind) -> tuple[float, ...]:
        whole = {stage: means.get((Kind.BACKWARD, stage), 0.0) for stage in range(stages)}
        other = Kind.WEIGHT if kind is Kind.INPUT else Kind.INPUT
        # A backward in one piece says nothing of its halves, unless the schedule has one of them too.
        halves = [
            max(whole[stage] - means[other, stage], 0.0) if (other, stage) in means else whole[stage] / 2
            for stage in range(stages)
        ]
        return tuple(means.get((kind, stage), halves[stage]) for stage in range(stages))

    return Durations(
        forward=tuple(means.get((Kind.FORWARD, stage), 0.0) for stage in range(stages)),
        input_grad=per_stage(Kind.INPUT),
        weight_grad=per_stage(Kind.WEIGHT),
        update=tuple(means.get((Kind.UPDATE, stage), 0.0) for stage in range(stages)),
    )
