"""A step's real timeline, over the plan of the same step.

The plan is simulated with the mean durations that were measured, so that what is left between the two is waiting and
messages, not a wrong guess at how long a stage takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline

RankSpans = Sequence[Sequence[tuple[str, float, float]]]
"""of every rank of pp: (an action's text, its start, its end), in seconds of one clock"""


def planned_and_measured(schedule: Schedule, spans: RankSpans) -> tuple[Timeline, Timeline]:
    """(planned, measured) of one step."""
    if schedule.name not in ASYNC_SCHEDULES:
        # Whoever holds the optimizer makes a synchronous step's updates after it. What the runtime took to pass them by
        # is not theirs.
        spans = [
            [(text, start, start if Action.parse(text).kind is ActionKind.UPDATE else end) for text, start, end in rank]
            for rank in spans
        ]
    measured = Timeline.from_spans(schedule.name, schedule.rank_of_stage, spans, note=schedule.note)
    return simulate(schedule, mean_durations(schedule.stages, spans)), measured


def mean_durations(stages: int, spans: RankSpans) -> Durations:
    """The mean seconds of each kind of action on each stage."""
    found: dict[tuple[ActionKind, int], list[float]] = {}
    for rank in spans:
        for text, start, end in rank:
            action = Action.parse(text)
            found.setdefault((action.kind, action.stage), []).append(end - start)
    means = {key: fmean(values) for key, values in found.items()}

    def per_stage(kind: ActionKind) -> tuple[float, ...]:
        whole = {stage: means.get((ActionKind.BACKWARD, stage), 0.0) for stage in range(stages)}
        other = ActionKind.WEIGHT_GRAD if kind is ActionKind.INPUT_GRAD else ActionKind.INPUT_GRAD
        # A backward in one piece says nothing of its halves, unless the schedule has one of them too.
        halves = [
            max(whole[stage] - means[other, stage], 0.0) if (other, stage) in means else whole[stage] / 2
            for stage in range(stages)
        ]
        return tuple(means.get((kind, stage), halves[stage]) for stage in range(stages))

    return Durations(
        forward=tuple(means.get((ActionKind.FORWARD, stage), 0.0) for stage in range(stages)),
        input_grad=per_stage(ActionKind.INPUT_GRAD),
        weight_grad=per_stage(ActionKind.WEIGHT_GRAD),
        update=tuple(means.get((ActionKind.UPDATE, stage), 0.0) for stage in range(stages)),
    )
