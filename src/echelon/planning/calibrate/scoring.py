"""Scores the planner on published runs: errors of step time, of memory fit, of ranking.

time        |predicted / measured - 1| of a step
coverage    share of runs inside the 80 % interval
fits        share of the runs that ran whose predicted memory fits their devices
fit         balanced accuracy: the mean of the shares of fitting and of out-of-memory runs that are predicted
regret      in each group of runs that differ only in layout and kernel: how much slower than the best measured one
            was the one that we rank first
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.calibrate.published_runs import PublishedRun
from echelon.planning.cost.memory_model import peak_memory
from echelon.planning.priced_plan import Plan, price

Array = NDArray[np.float64]
MIN_ROWS = 3
"""rows from which a source, or a group of runs, counts"""


@dataclass(frozen=True, kw_only=True)
class TimeErrors:
    """Of step times: |predicted / measured - 1|."""

    rows: int
    median: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class SourceScore:
    rows: int
    time_median: float | None
    time_p90: float | None
    fits: float | None
    """share of the timed runs that are predicted to fit"""
    fit_accuracy: float | None
    """none where no run, or every run, was out of memory"""
    regret: float | None
    """none where no group has several runs"""
    assumed: dict[str, dict[str, int]]
    """what rows leave out: by key, the values in their place with the runs that have each"""


@dataclass(frozen=True, kw_only=True)
class Score:
    sources: dict[str, SourceScore]
    time_median: float
    """mean over the sources with several rows"""
    time_p90: float
    fits: float
    """share of all timed runs that are predicted to fit"""
    fit_accuracy: float | None
    regret: float | None
    coverage: float
    half_width: float
    """median half of the interval, as a share of the prediction"""
    skipped: dict[str, int]
    """rows that cannot be predicted, by reason"""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def time_errors(sources: Sequence[str], predicted: Array, measured: Array) -> dict[str, TimeErrors]:
    wrong, named = np.abs(predicted / measured - 1), np.array(sources)
    by_source = {source: wrong[named == source] for source in sorted(set(sources))}
    return {
        source: TimeErrors(rows=len(errors), median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9)))
        for source, errors in by_source.items()
    }


def score_runs(
    runs: Sequence[PublishedRun],
    skipped: dict[str, int],
    c: Constants = FITTED_CONSTANTS,
    *,
    track: Callable[[Iterable[PublishedRun]], Iterable[PublishedRun]] = iter,
) -> Score:
    timed = [(run, price(run.scenario, c)) for run in track(runs) if run.seconds]
    predicted, measured = np.array([plan.seconds for _, plan in timed]), np.array([run.seconds for run, _ in timed])
    wrong = time_errors([run.source for run, _ in timed], predicted, measured)
    sources = sorted({run.source for run in runs})
    fitting = {source: [plan.fits for run, plan in timed if run.source == source] for source in wrong}
    accuracies = {source: fit_accuracy([run for run in runs if run.source == source], c) for source in sources}
    regrets = {source: regret([pair for pair in timed if pair[0].source == source]) for source in wrong}
    several = [one for one in wrong.values() if one.rows >= MIN_ROWS]
    known = [value for value in accuracies.values() if value is not None]
    groups = [value for value in regrets.values() if value is not None]
    return Score(
        sources={
            source: SourceScore(
                rows=wrong[source].rows if source in wrong else 0,
                time_median=wrong[source].median if source in wrong else None,
                time_p90=wrong[source].p90 if source in wrong else None,
                fits=statistics.mean(map(float, fitting[source])) if source in fitting else None,
                fit_accuracy=accuracies[source],
                regret=regrets.get(source),
                assumed=_assumed([run for run in runs if run.source == source]),
            )
            for source in sources
        },
        time_median=statistics.mean(one.median for one in several) if several else float("nan"),
        time_p90=statistics.mean(one.p90 for one in several) if several else float("nan"),
        fits=statistics.mean(float(plan.fits) for _, plan in timed) if timed else 0.0,
        fit_accuracy=statistics.mean(known) if known else None,
        regret=statistics.mean(groups) if groups else None,
        coverage=statistics.mean(float(plan.low <= run.seconds <= plan.high) for run, plan in timed) if timed else 0.0,
        half_width=statistics.median((plan.high - plan.low) / 2 / plan.seconds for _, plan in timed) if timed else 0.0,
        skipped=skipped,
    )


def _assumed(runs: Sequence[PublishedRun]) -> dict[str, dict[str, int]]:
    """What the rows of runs leave out, and how often each value took its place."""
    keys = sorted({key for run in runs for key in run.assumed})
    return {key: dict(Counter(str(run.assumed[key]) for run in runs if key in run.assumed)) for key in keys}


def fit_accuracy(runs: Sequence[PublishedRun], c: Constants = FITTED_CONSTANTS) -> float | None:
    """Balanced over those that fitted and those that did not; none where one of the two is missing."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    for run in runs:
        fits = peak_memory(run.scenario, c).total <= run.scenario.cluster.memory
        right[run.out_of_memory].append(fits != run.out_of_memory)
    if not all(right.values()):
        return None
    return statistics.mean(statistics.mean(map(float, side)) for side in right.values())


def regret(timed: Sequence[tuple[PublishedRun, Plan]]) -> float | None:
    """Mean over the groups of several runs; none where there are none."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run, plan in timed:
        groups[run.group].append((plan.seconds, run.seconds))
    large = [runs for runs in groups.values() if len(runs) >= MIN_ROWS]
    losses = [min(runs)[1] / min(measured for _, measured in runs) - 1 for runs in large]
    return statistics.mean(losses) if losses else None
