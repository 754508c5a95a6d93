"""Fits the planner's constants (src/echelon/planning/calibrate/constants.py) to a table
of published runs, or to measured steps of Echelon.

    python bench/fit.py TABLE.csv                  prints the constants, to be pasted, and the errors
    python bench/fit.py TABLE.csv --leave-out      the errors on each source by constants that never saw it
    python bench/fit.py TABLE.csv --accuracy       writes accuracy.json, which the docs quote, also of unseen.csv
    python bench/fit.py STEPS.json                 the measured NATIVE_OVERRIDES, from what `echelon bench` found

Every source weighs the same, whatever its rows. Residuals are logarithms of predicted over measured, taken by their
absolute value beyond a few per cent, so that a run that went wrong does not bend the fit. Constants are held near what
devices and papers say (`HELD`): those that the rows say little about stay there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.bench import planner_comparison
from echelon.planning.calibrate import published_runs
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, NATIVE_OVERRIDES, Constants
from echelon.planning.calibrate.published_runs import PublishedRun
from echelon.planning.calibrate.scoring import MIN_ROWS, Score, TimeErrors, score_runs, time_errors
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.step_time import step_times
from echelon.planning.cost.step_work import StepWork, stack_work

Array = NDArray[np.float64]
OTHERS = (
    *("cpu", "single_device_share", "activation_slack", "backward_working", "context_gib", "unfused_norm_saved"),
    *("spread", "spread_experts"),
)
"""constants that times do not depend on, or that no published run tells"""
NAMES = tuple(field.name for field in fields(Constants) if field.name not in OTHERS)
SOFT = 0.07
"""residuals are squared up to about this, and taken as they are beyond"""
HOLD = 0.05
"""what a factor of e away from the start costs, as a residual"""
HELD = {
    **dict.fromkeys(("intra_node", "inter_node"), 2.0),
    **dict.fromkeys(("pre_hopper_links", "fsdp_overlap", "fsdp_exposed", "unfused_norms"), 0.3),
    **dict.fromkeys(("tp_exposed", "update_bytes", "step_overhead", "edge", "expert_edge", "dp_overlap"), 0.2),
    **dict.fromkeys(("pp_exposed", "ep_exposed", "memory_bandwidth"), 0.1),
}
START = FITTED_CONSTANTS
OWN_NAMES = tuple(name for name, value in NATIVE_OVERRIDES.items() if value and name != "blockwise_attention")
"""constants of our own program that steps on one device tell"""


def fit(works: StepWork, seconds: Array, weights: Array, start: Constants, names: tuple[str, ...] = NAMES) -> Constants:
    """The constants with the least residuals, each at least 0."""
    begin = np.array([getattr(start, name) for name in names])
    held = np.array([HELD.get(name, HOLD) for name in names])

    def constants(x: Array) -> Constants:
        return replace(start, **dict(zip(names, (begin * np.exp(x)).tolist(), strict=True)))

    def residuals(x: Array) -> Array:
        wrong = np.log(step_times(works, constants(x)).total / seconds)
        soft = np.sign(wrong) * np.sqrt(2 * SOFT * (np.sqrt(SOFT**2 + wrong**2) - SOFT))
        return np.concatenate([4 * weights * soft, held * x])

    return constants(least_squares(residuals, np.zeros(len(names))))


def least_squares(residuals: Callable[[Array], Array], x: Array, *, rounds: int = 80, step: float = 1e-4) -> Array:
    """Levenberg and Marquardt's method with differences for derivatives."""
    damping, now = 1e-2, residuals(x)
    for _ in range(rounds):
        columns = [(residuals(x + step * unit) - now) / step for unit in np.eye(len(x))]
        slope = np.stack(columns, axis=1)
        square, down = slope.T @ slope, slope.T @ now
        while damping < 1e6:
            moved = x - np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), down)
            there = residuals(moved)
            if there @ there < now @ now:
                break
            damping *= 4
        else:
            return x
        if now @ now - there @ there < 1e-7 * (now @ now):
            return moved
        x, now, damping = moved, there, damping / 3
    return x


def weights_of(sources: list[str]) -> Array:
    return np.array([1 / np.sqrt(sources.count(source)) for source in sources])


def leave_out(timed: Sequence[PublishedRun]) -> dict[str, TimeErrors]:
    """The errors on each source by constants that are fitted to the others."""
    works = [count_work(run.scenario) for run in timed]
    seconds, sources = np.array([run.seconds for run in timed]), [run.source for run in timed]
    found: dict[str, TimeErrors] = {}
    for source in sorted(set(sources)):
        kept = [i for i, other in enumerate(sources) if other != source]
        tried = [i for i, other in enumerate(sources) if other == source]
        weights = weights_of([sources[i] for i in kept])
        constants = fit(stack_work([works[i] for i in kept]), seconds[kept], weights, START)
        predicted = step_times(stack_work([works[i] for i in tried]), constants).total
        found |= time_errors([source] * len(tried), predicted, seconds[tried])
    return found


def time_summary(found: dict[str, TimeErrors]) -> dict[str, Any]:
    """Means over sources, as `echelon score` takes them."""
    several = [one for one in found.values() if one.rows >= MIN_ROWS]
    median, p90 = (float(np.mean([getattr(one, name) for one in several])) for name in ("median", "p90"))
    return {
        "runs": sum(one.rows for one in found.values()),
        "sources": len(found),
        "time_median": round(median, 3),
        "time_p90": round(p90, 3),
    }


def score_summary(found: Score) -> dict[str, Any]:
    timed = {
        source: TimeErrors(rows=one.rows, median=one.time_median, p90=one.time_p90)
        for source, one in found.sources.items()
        if one.time_median is not None and one.time_p90 is not None
    }
    return {
        **time_summary(timed),
        "coverage": round(found.coverage, 2),
        "half_width": round(found.half_width, 2),
        "worst": max(timed, key=lambda source: timed[source].median),
        "fit_accuracy": {name: round(one.fit_accuracy, 3) for name, one in found.sources.items() if one.fit_accuracy},
        "regret": {name: round(one.regret, 3) for name, one in found.sources.items() if one.regret is not None},
    }


def write_accuracy(table: Path) -> None:
    seen, unseen = (
        published_runs.parse_runs(published_runs.read_runs(path)) for path in (table, table.parent / "unseen.csv")
    )
    found = {
        "fitted": score_summary(score_runs(*seen)),
        "left out": time_summary(leave_out([run for run in seen[0] if run.seconds])),
        "unseen": score_summary(score_runs(*unseen)),
    }
    (table.parent / "accuracy.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def shown(title: str, found: dict[str, TimeErrors]) -> None:
    print(title)
    for source, one in found.items():
        print(f"  {source:18s} {one.rows:4d} rows  median {one.median:6.1%}  p90 {one.p90:6.1%}")
    mean = time_summary(found)
    print(f"  {'mean over sources':18s}            median {mean['time_median']:6.1%}  p90 {mean['time_p90']:6.1%}")


def fit_own(path: str) -> None:
    """Fit to measured steps of Echelon, in the precisions that the planner distinguishes, with equal weights."""
    steps = [step for step in planner_comparison.read_steps(path) if step.precision == step.scenario.precision]
    works, seconds = (
        stack_work([count_work(step.scenario) for step in steps]),
        np.array([step.seconds for step in steps]),
    )
    before = replace(FITTED_CONSTANTS, **NATIVE_OVERRIDES)
    found = fit(works, seconds, np.ones(len(steps)), before, OWN_NAMES)
    for name in OWN_NAMES:
        print(f'    "{name}": {getattr(found, name):.3g},')
    print("seconds over those measured, with the constants in force and with these")
    columns = step_times(works, before).total / seconds, step_times(works, found).total / seconds
    for step, old, new in zip(steps, *columns, strict=True):
        scenario = step.scenario
        print(f"  {old:.3f} {new:.3f}  {scenario.shape.name}, {scenario.seq_len}, {step.precision}, {scenario.layout}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="a CSV of published runs, or a JSON of steps of our own")
    parser.add_argument("--leave-out", action="store_true", help="fit without each source in turn, and try it on that")
    parser.add_argument("--accuracy", action="store_true", help="write accuracy.json")
    options = parser.parse_args()
    if options.table.endswith(".json"):
        fit_own(options.table)
        return 0
    if options.accuracy:
        write_accuracy(Path(options.table))
        return 0
    asked = [
        question
        for question in published_runs.parse_runs(published_runs.read_runs(options.table))[0]
        if question.seconds
    ]
    if options.leave_out:
        shown("errors on each source by constants that never saw it", leave_out(asked))
        return 0
    works = [count_work(question.scenario) for question in asked]
    seconds = np.array([question.seconds for question in asked])
    sources = [question.source for question in asked]
    constants = fit(stack_work(works), seconds, weights_of(sources), START)
    for name, value in asdict(constants).items():
        print(f"    {name}: float = {value:.4g}")
    before = step_times(stack_work(works), FITTED_CONSTANTS).total
    after = step_times(stack_work(works), constants).total
    shown("with the constants in force", time_errors(sources, before, seconds))
    shown("with these", time_errors(sources, after, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
