"""Fits the planner's constants (src/echelon/planning/calibrate/) to a table of published runs, or to measured steps of
Echelon, and says how well they predict runs that they never saw.

    python bench/fit.py TABLE.csv                  prints the constants, to be pasted, and the errors
    python bench/fit.py TABLE.csv --leave-out      the errors on each source, program, hardware generation and strategy
                                                   by constants that never saw it
    python bench/fit.py TABLE.csv --accuracy       writes accuracy.json, which the docs quote
    python bench/fit.py STEPS.json                 the measured NATIVE_OVERRIDES, from what `echelon bench` found

Every source weighs the same, whatever its rows. Residuals are logarithms of predicted over measured, taken by their
absolute value beyond a few per cent, so that a run that went wrong does not bend the fit.

Every fit starts from PRIORS, which come from data sheets, papers and benchmarks of single operators, and is held near
them: a constant that the rows do not determine stays there, and no fit that leaves a source out has seen it. Shares
stay below 1, by the logistic function. A program without a row has the mean profile of the others.

Intervals are conformal: as wide as QUANTILE of the left-out runs need, every source with the same weight. Their
coverage is that of a left-out group by the width which the other groups need, and by the interval that plans print.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.bench import planner_comparison
from echelon.planning.calibrate import published_runs
from echelon.planning.calibrate.confidence import interval_factor
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, NATIVE_OVERRIDES, Constants
from echelon.planning.calibrate.programs import OWN_PROGRAMS, PROGRAMS, ProgramProfile
from echelon.planning.calibrate.published_runs import PublishedRun
from echelon.planning.calibrate.scoring import MIN_ROWS, Score, TimeErrors, score_runs, time_errors
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.step_time import step_times
from echelon.planning.cost.step_work import StepWork, stack_work

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    value: float
    spread: float = 0.5
    """a residual of HOLD is what it costs to be a factor of 1 + spread away"""
    share: bool = False
    """at most 1"""


HELD = 0.2
"""spread of a constant that one source alone moves: it stays near what is published"""
PRIORS = {
    # GEMMs of libraries on these devices; a TPU holds its clock
    "volta": Prior(0.75, 0.1, True),
    "ampere": Prior(0.7, 0.15, True),
    "hopper": Prior(0.7, 0.1, True),  # 0.706 on an H200
    "blackwell": Prior(0.55, 0.15, True),
    **{name: Prior(0.58, 0.15, True) for name in ("hopper_fp8", "blackwell_fp8")},
    **{name: Prior(value, 0.15, True) for name, value in {"fp4": 0.45, "accelerator": 0.55}.items()},
    "tpu": Prior(0.9, 0.05, True),  # large GEMMs of XLA
    "edge": Prior(80, 0.4),
    "misaligned_gemms": Prior(0.5),
    "expert_edge": Prior(200, 0.2),
    # the papers of flash attention, forward and backward
    "flash1": Prior(0.3, share=True),
    "flash2": Prior(0.42, share=True),
    # the vendor's kernel in a step; held as its GEMMs are: one source alone would move it
    "best_attention": Prior(0.55, 0.1, True),  # 0.553 on an H200
    "blackwell_attention": Prior(0.45, share=True),
    "fused_score_bytes": Prior(12),
    "plain_score_bytes": Prior(30, HELD),  # by what the operators read and write
    "memory_bandwidth": Prior(0.85, 0.1, True),
    # RMSNorm by torch's operators, in 32 bits: 36 bytes for each 4 of one kernel, and the residual's 6
    "unfused_norms": Prior(6, HELD),
    "cast_bytes": Prior(6),
    # steps of few tokens on an H200; what Megatron's update and norm do once a step
    "launch": Prior(1.45e-3, 0.5),
    "step_overhead": Prior(0.02, 0.5),
    "launch_experts": Prior(1e-3),
    # nccl-tests
    "intra_node": Prior(0.8, 0.1, True),
    "inter_node": Prior(0.85, 0.1, True),
    "hop_intra": Prior(3.4e-6, 0.3),
    "hop_inter": Prior(14e-6, 0.3),
    "congestion": Prior(0.03, HELD, True),
    "ep_exposed": Prior(0.5, share=True),
    "pp_exposed": Prior(0.3, share=True),
    "contention": Prior(0.15, share=True),
    # Adam reads 16 bytes and writes 14, gradients are zeroed, and read and scaled by their norm
    "update_bytes": Prior(46, 0.2),
}
PROFILE_PRIORS = {
    "speed": Prior(1.0, 0.05),
    "traffic": Prior(1.0, 0.3),
    # backward hides reductions as it goes, but not those of the first layers (PyTorch DDP, Megatron)
    "overlap": Prior(0.6, 0.5, True),
    "tp_overlap": Prior(0.6, 0.5, True),
}
OVERLAPS_TP = ("megatron",)
"""programs that overlap tensor parallelism with GEMMs; others have none"""
BASE_PROGRAM = "megatron"
"""whose speed and traffic are 1: the shares of the peak and the bytes are its own"""


def _program_prior(program: str, name: str) -> Prior:
    if (program, name) == ("megatron-2021", "overlap"):
        return Prior(0.1, 1.0, True)
    return PROFILE_PRIORS[name]


PROGRAM_PRIORS = {
    f"{program}.{name}": _program_prior(program, name)
    for program in PROGRAMS
    for name in PROFILE_PRIORS
    if program not in (*OWN_PROGRAMS, "unknown")
    and not (program == BASE_PROGRAM and name in ("speed", "traffic"))
    and not (name == "tp_overlap" and program not in OVERLAPS_TP)
}
SOFT = 0.1
"""residuals are squared up to about this, and taken as they are beyond"""
HOLD = 0.12
OWN_NAMES = ("hopper", "hopper_fp8", "best_attention", "expert_edge", "launch_experts", "memory_bandwidth")
"""constants of our own program that steps on one device tell"""
QUANTILE = 0.8
"""of the runs lie in an interval"""


@dataclass(frozen=True)
class Vector:
    """Constants as unbounded numbers, 0 at their priors."""

    priors: dict[str, Prior]
    start: Constants

    @property
    def held(self) -> Array:
        """What a unit costs; a unit of a share near 1 changes it by less."""
        return np.array(
            [HOLD / one.spread * (1 - one.value if self._is_tight(one) else 1) for one in self.priors.values()]
        )

    @staticmethod
    def _is_tight(prior: Prior) -> bool:
        return prior.share and prior.spread < 0.5

    def constants(self, x: Array, programs: Collection[str] = PROGRAMS) -> Constants:
        """The constants of a vector; programs that are not in `programs` have the mean of those that are."""
        values = {name: _value(one, float(z)) for (name, one), z in zip(self.priors.items(), x, strict=True)}
        profiles = {
            program: replace(
                profile,
                **{key: values.pop(f"{program}.{key}") for key in PROFILE_PRIORS if f"{program}.{key}" in values},
            )
            for program, profile in zip(PROGRAMS, self.start.profiles, strict=True)
        }
        known = [profiles[name] for name in PROGRAMS if name in programs and f"{name}.overlap" in self.priors]
        if known:
            mean = {
                one.name: _mean([getattr(profile, one.name) for profile in known]) for one in fields(ProgramProfile)
            }
            for name in PROGRAMS:
                if (name not in programs and name not in OWN_PROGRAMS) or name == "unknown":
                    profiles[name] = ProgramProfile(**mean)
        return replace(self.start, **values, profiles=tuple(profiles[name] for name in PROGRAMS))


def _mean(values: Sequence[float]) -> float:
    """The geometric mean, or the mean if one of them is 0."""
    return float(np.exp(np.mean(np.log(values))) if min(values) > 0 else np.mean(values))


def _value(prior: Prior, z: float) -> float:
    return 1 / (1 + (1 / prior.value - 1) * np.exp(-z)) if prior.share else prior.value * np.exp(z)


PUBLISHED = Vector(PRIORS | PROGRAM_PRIORS, FITTED_CONSTANTS)


def fit(works: StepWork, seconds: Array, weights: Array, vector: Vector = PUBLISHED) -> Array:
    """The vector with the least residuals."""
    held = vector.held

    def residuals(x: Array) -> Array:
        wrong = np.log(step_times(works, vector.constants(x)).total / seconds)
        soft = np.sign(wrong) * np.sqrt(2 * SOFT * (np.sqrt(SOFT**2 + wrong**2) - SOFT))
        return np.concatenate([4 * weights * soft, held * x])

    return least_squares(residuals, np.zeros(len(held)))


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
        if now @ now - there @ there < 1e-6 * (now @ now):
            return moved
        x, now, damping = moved, there, damping / 3
    return x


class Table:
    """The timed runs of a table, counted once."""

    def __init__(self, runs: Sequence[PublishedRun]):
        self.runs = [run for run in runs if run.seconds]
        self.works = [count_work(run.scenario) for run in self.runs]
        self.seconds = np.array([run.seconds for run in self.runs])
        self.sources = [run.source for run in self.runs]

    def fit(self, rows: Sequence[int]) -> Constants:
        """The constants that are fitted to some rows."""
        sources = [self.sources[i] for i in rows]
        weights = np.array([1 / np.sqrt(sources.count(source)) for source in sources])
        x = fit(stack_work([self.works[i] for i in rows]), self.seconds[list(rows)], weights)
        return PUBLISHED.constants(x, {self.runs[i].scenario.program for i in rows})

    def predict(self, rows: Sequence[int], constants: Constants) -> Array:
        predicted: Array = step_times(stack_work([self.works[i] for i in rows]), constants).total
        return predicted

    def leave_out(self, group_of: Callable[[PublishedRun], str]) -> Array:
        """Seconds of every run by constants that are fitted to the runs of other groups."""
        groups, predicted = [group_of(run) for run in self.runs], np.zeros(len(self.runs))
        for group in sorted(set(groups)):
            kept, tried = ([i for i, other in enumerate(groups) if (other != group) == keep] for keep in (True, False))
            predicted[tried] = self.predict(tried, self.fit(kept))
        return predicted

    def errors(self, predicted: Array) -> dict[str, TimeErrors]:
        return time_errors(self.sources, predicted, self.seconds)

    def has_experts(self, rows: Sequence[int], wanted: bool) -> list[int]:
        return [i for i in rows if bool(self.runs[i].scenario.shape.experts) == wanted]

    def coverage(self, predicted: Array, group_of: Callable[[PublishedRun], str]) -> dict[str, float]:
        """Share of the runs of each left-out group within the width that the other groups need, every source with the
        same weight."""
        groups = [group_of(run) for run in self.runs]
        inside = np.zeros(len(self.runs), dtype=bool)
        for group in sorted(set(groups)):
            for experts in (False, True):
                kept = self.has_experts([i for i, other in enumerate(groups) if other != group], experts)
                tried = self.has_experts([i for i, other in enumerate(groups) if other == group], experts)
                # Only runs with experts tell the width of such runs; without any, the others do.
                kept = kept or [i for i, other in enumerate(groups) if other != group]
                width = self.spread(predicted, kept)
                inside[tried] = np.abs(np.log(predicted[tried] / self.seconds[tried])) <= width
        return self.shares(inside, groups)

    def shipped_coverage(self, predicted: Array, group_of: Callable[[PublishedRun], str]) -> dict[str, float]:
        """The same within the interval that plans print."""
        factors = np.array([interval_factor(run.scenario, FITTED_CONSTANTS) for run in self.runs])
        inside = np.abs(np.log(predicted / self.seconds)) <= np.log(factors)
        return self.shares(inside, [group_of(run) for run in self.runs])

    def shares(self, inside: NDArray[np.bool_], groups: Sequence[str]) -> dict[str, float]:
        """The share of each group, and of all: means over sources."""
        found: dict[str, float] = {}
        for name in (*sorted(set(groups)), "all"):
            rows = [i for i, group in enumerate(groups) if name in (group, "all")]
            sources = sorted({self.sources[i] for i in rows})
            means = [np.mean([inside[i] for i in rows if self.sources[i] == source]) for source in sources]
            found[name] = round(float(np.mean(means)), 2)
        return found

    def spread(self, predicted: Array, rows: Sequence[int]) -> float:
        """The logarithm within which QUANTILE of the runs lie, every source with the same weight."""
        wrong = np.abs(np.log(predicted[rows] / self.seconds[rows]))
        sources = [self.sources[i] for i in rows]
        weights = np.array([1 / sources.count(source) for source in sources])
        order = np.argsort(wrong)
        share = np.cumsum(weights[order]) / weights.sum()
        return float(wrong[order][np.searchsorted(share, QUANTILE)])


def strategy(run: PublishedRun) -> str:
    layout = run.scenario.layout
    degrees = {"experts": run.scenario.shape.experts, "cp": layout.cp - 1, "pp": layout.pp - 1, "tp": layout.tp - 1}
    return next((name for name, used in degrees.items() if used), "fsdp" if layout.zero == 3 else "dp")


GROUPS: dict[str, Callable[[PublishedRun], str]] = {
    "source": lambda run: run.source,
    "program": lambda run: run.scenario.program,
    "hardware": lambda run: run.scenario.cluster.device.generation,
    "strategy": strategy,
}


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
        "fits": round(found.fits, 3),
        "worst": max(timed, key=lambda source: timed[source].median),
        "fit_accuracy": {name: round(one.fit_accuracy, 3) for name, one in found.sources.items() if one.fit_accuracy},
        "regret": {name: round(one.regret, 3) for name, one in found.sources.items() if one.regret is not None},
    }


def left_out_summary(table: Table, group: Callable[[PublishedRun], str]) -> dict[str, Any]:
    predicted = table.leave_out(group)
    coverage, shipped = table.coverage(predicted, group), table.shipped_coverage(predicted, group)
    worst = min((name for name in coverage if name != "all"), key=lambda name: coverage[name])
    return {
        **time_summary(table.errors(predicted)),
        "coverage": coverage["all"],
        "coverage_worst": {worst: coverage[worst]},
        "shipped_coverage": shipped["all"],
    }


def write_accuracy(path: Path) -> None:
    runs, skipped = published_runs.parse_runs(published_runs.read_runs(path))
    table = Table(runs)
    left_out = {name: left_out_summary(table, group) for name, group in GROUPS.items()}
    found = {"fitted": score_summary(score_runs(runs, skipped)), "left out": left_out}
    (path.parent / "accuracy.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def shown(title: str, found: dict[str, TimeErrors]) -> None:
    print(title)
    for source, one in found.items():
        print(f"  {source:18s} {one.rows:4d} rows  median {one.median:6.1%}  p90 {one.p90:6.1%}")
    mean = time_summary(found)
    print(f"  {'mean over sources':18s}            median {mean['time_median']:6.1%}  p90 {mean['time_p90']:6.1%}")


def show_constants(constants: Constants) -> None:
    for one in fields(Constants):
        value = getattr(constants, one.name)
        if isinstance(value, float):
            print(f"    {one.name}: float = {value:.4g}")
    for name, profile in zip(PROGRAMS, constants.profiles, strict=True):
        values = ", ".join(f"{one.name}={getattr(profile, one.name):.3g}" for one in fields(ProgramProfile))
        print(f'    "{name}": ProgramProfile({values}),')


def fit_own(path: str) -> None:
    """Fit to measured steps of Echelon, in the precisions that the planner distinguishes, with equal weights."""
    steps = [step for step in planner_comparison.read_steps(path) if step.precision == step.scenario.precision]
    works, seconds = (
        stack_work([count_work(step.scenario) for step in steps]),
        np.array([step.seconds for step in steps]),
    )
    before = replace(FITTED_CONSTANTS, **NATIVE_OVERRIDES)
    vector = Vector({name: replace(PRIORS[name], value=getattr(before, name)) for name in OWN_NAMES}, before)
    found = vector.constants(fit(works, seconds, np.ones(len(steps)), vector))
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
    parser.add_argument("--leave-out", action="store_true", help="fit without each group in turn, and try it on that")
    parser.add_argument("--accuracy", action="store_true", help="write accuracy.json")
    options = parser.parse_args()
    if options.table.endswith(".json"):
        fit_own(options.table)
        return 0
    if options.accuracy:
        write_accuracy(Path(options.table))
        return 0
    table = Table(published_runs.parse_runs(published_runs.read_runs(options.table))[0])
    rows = range(len(table.runs))
    if options.leave_out:
        for name, group in GROUPS.items():
            predicted = table.leave_out(group)
            shown(f"errors by constants that never saw the same {name}", table.errors(predicted))
            for what, kept in (("dense", False), ("experts", True)):
                width = table.spread(predicted, table.has_experts(rows, kept))
                print(f"  {what:18s} {QUANTILE:.0%} lie within a logarithm of {width:.3f}")
            for title, shares in (
                ("coverage", table.coverage(predicted, group)),
                ("as plans print it", table.shipped_coverage(predicted, group)),
            ):
                print(f"  {title:18s} " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
        return 0
    constants = table.fit(rows)
    show_constants(constants)
    shown("with the constants in force", table.errors(table.predict(rows, FITTED_CONSTANTS)))
    shown("with these", table.errors(table.predict(rows, constants)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
