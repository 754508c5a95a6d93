"""The measured timeline of a step, and the planned one to compare it with.

The plan is simulated with the mean measured durations of actions, so that the two differ by waiting and transfers, not
by wrong estimates of a stage's time.
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
"""for every pp rank (action's text, start, end), in seconds of one clock"""


def planned_and_measured(schedule: Schedule, spans: RankSpans) -> tuple[Timeline, Timeline]:
    """(planned, measured) of one step."""
    if schedule.name not in ASYNC_SCHEDULES:
        # The engine runs a synchronous step's updates after it. The time the runtime took to skip them is not theirs.
        spans = [
            [(text, start, start if Action.parse(text).kind is ActionKind.UPDATE else end) for text, start, end in rank]
            for rank in spans
        ]
    measured = Timeline.from_spans(schedule.name, schedule.rank_of_stage, spans, note=schedule.note)
    return simulate(schedule, mean_durations(schedule.stages, spans)), measured


def mean_durations(stages: int, spans: RankSpans) -> Durations:
    """The mean seconds of each kind of action on each stage."""
    seconds: dict[tuple[ActionKind, int], list[float]] = {}
    for rank in spans:
        for text, start, end in rank:
            action = Action.parse(text)
            seconds.setdefault((action.kind, action.stage), []).append(end - start)
    means = {key: fmean(values) for key, values in seconds.items()}

    def per_stage(kind: ActionKind) -> tuple[float, ...]:
        backward = {stage: means.get((ActionKind.BACKWARD, stage), 0.0) for stage in range(stages)}
        other = ActionKind.WEIGHT_GRAD if kind is ActionKind.INPUT_GRAD else ActionKind.INPUT_GRAD
        # The duration of B does not tell those of I and W, unless the schedule has one of them too.
        halves = [
            max(backward[stage] - means[other, stage], 0.0) if (other, stage) in means else backward[stage] / 2
            for stage in range(stages)
        ]
        return tuple(means.get((kind, stage), halves[stage]) for stage in range(stages))

    return Durations(
        forward=tuple(means.get((ActionKind.FORWARD, stage), 0.0) for stage in range(stages)),
        input_grad=per_stage(ActionKind.INPUT_GRAD),
        weight_grad=per_stage(ActionKind.WEIGHT_GRAD),
        update=tuple(means.get((ActionKind.UPDATE, stage), 0.0) for stage in range(stages)),
    )
