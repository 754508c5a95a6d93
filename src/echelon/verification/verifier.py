"""`verify`: a verdict per layout; for one that fails, the first parameter and the mesh axis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from echelon.config.run_config import Config
from echelon.launch.rank_failure import RankError
from echelon.launch.rank_pool import RankPool
from echelon.launch.scratch_dir import ScratchFolder
from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.models.foreign.hf_source import is_hf_model
from echelon.models.model_config import ModelConfig
from echelon.models.user_model import is_refusal
from echelon.parallel.refused_layouts import find_hf_layout_issues
from echelon.pipeline.schedules import updates_per_step
from echelon.verification.as_configured import DerivedTolerance, num_draws, reference_errors
from echelon.verification.compare import Difference, RankReport, run_and_compare
from echelon.verification.emulation import write_emulation
from echelon.verification.fold_layout import DEFAULT_MAX_RANKS
from echelon.verification.layout_case import case_for_layout
from echelon.verification.truth import write_truth
from echelon.verification.verified_config import Replacement
from echelon.verification.verify_case import VerifyCase
from echelon.verification.verify_request import (
    check_leave_out,
    check_max_ranks,
    configure_case,
    default_layouts,
    make_case,
    parse_layouts,
)

TOLERANCE, RELATIVE_TOLERANCE, TIMEOUT = 1e-10, 1e-9, 120.0
"""largest `Difference.error` and `Difference.relative` that pass in float64; seconds for each collective"""
USUAL_PASSES = 256
"""forward passes of stages in a step that TIMEOUT suits; more get longer in proportion"""
PRELOAD = ("echelon.verification.compare", "echelon.verification.truth")
"""modules that every rank needs, imported once before the pool forks"""
Tolerance = Callable[[Difference], float]
"""the relative error that is allowed"""


@dataclass(frozen=True, kw_only=True)
class LayoutVerdict:
    """The result of one layout."""

    layout: str
    passed: bool
    max_error: float
    """largest of all quantities: max|a-b| / max(1, max|b|)"""
    max_relative: float
    """norm(a-b) / norm(b) of the quantity that comes nearest to its tolerance"""
    tolerance: float
    """of that quantity: 1e-9 in float64, derived as configured (as_configured.py)"""
    first_difference: Difference | None
    """the first above the tolerance: by step, gradients before weights, in the order of the model's parameters"""
    axis: str
    """the mesh axis whose reduction is wrong, or the axes of which none fails alone; empty if it passed"""
    seconds: float
    replaced: tuple[Replacement, ...] = ()
    """values of the configuration that its reduced model is too small for"""
    trouble: str = ""
    """why it could not be compared, if so"""
    untested: tuple[str, ...] = ()
    """parameters whose updates could be left out: their precision is off by more than an update"""
    ran: str = ""
    """the layout as it ran"""
    folded: str = ""
    """what was folded to run it here; empty if nothing was"""
    model: str = ""
    """the sizes of the model that ran"""

    def to_json(self) -> dict[str, Any]:
        first = self.first_difference
        errors = {"error": first.error, "relative": first.relative} if first else {}
        shown = first and {"parameter": first.name or first.kind, "axis": self.axis, **errors}
        return {
            "layout": self.layout,
            "passed": self.passed,
            "max_error": self.max_error,
            "max_relative": self.max_relative,
            "tolerance": self.tolerance,
            "first_difference": shown,
            "seconds": self.seconds,
            "ran": self.ran,
            "folded": self.folded,
            "model": self.model,
            "replaced": [asdict(each) for each in self.replaced],
            "untested": list(self.untested),
        } | ({"trouble": self.trouble} if self.trouble else {})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One verdict per layout.

    >>> ec.verify("gpt-tiny", "dp=2").to_json()["passed"]
    True
    """

    verdicts: tuple[LayoutVerdict, ...]
    replaced: tuple[Replacement, ...] = ()
    """values of the configuration that were not run as they are"""

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        verdicts, replaced = [verdict.to_json() for verdict in self.verdicts], [asdict(each) for each in self.replaced]
        return {"passed": self.passed, "layouts": verdicts, "replaced": replaced}


def verify(
    model: str | ModelConfig | Callable[[], Any] = "llama-tiny",
    layouts: str | Sequence[str | Layout] | None = None,
    *,
    batch: str | Callable[[int, int], Any] = "",
    leave_out: str = "",
    max_ranks: int = DEFAULT_MAX_RANKS,
    config: Config | None = None,
    as_configured: bool = False,
    pool: RankPool | None = None,
    progress: Callable[[LayoutVerdict], None] = lambda _: None,
    **case_options: Any,
) -> Report:
    """Run each layout against one device, on a reduced model, with the options of `config`.

    It runs in float64; with `as_configured` in the precision, kernels and compression of `config`, on its device.

    `model` is a named model, or a function (or `file.py:function`) that builds a custom one, with `batch` a function of
    (sequences, seed) that makes its batches. `leave_out` drops a collective on purpose, such as "tp:all_reduce", to see
    the failure. Without `layouts`, it takes defaults for the model. A layout of more than `max_ranks` ranks is folded
    to as many, and its verdict says what was folded.

    >>> report = ec.verify("llama-tiny", "dp=2; tp=2")
    >>> report.passed
    True
    """
    check_leave_out(leave_out)
    check_max_ranks(max_ranks)
    case = make_case(model, batch, max_ranks=max_ranks, **case_options)
    replaced: tuple[Replacement, ...] = ()
    if config is not None or as_configured:
        case, replaced = configure_case(case, config or Config(), as_configured=as_configured)
    layouts_to_run = parse_layouts(default_layouts(case) if layouts is None else layouts, case)
    with RankPool(preload=PRELOAD, device=case.config.device) if pool is None else nullcontext(pool) as ranks:
        return replace(Verifier(ranks, case, leave_out).report(layouts_to_run, progress), replaced=replaced)


class Verifier:
    """Runs layouts on a pool of ranks, and computes the truth of each (batch, microbatches) once."""

    def __init__(self, pool: RankPool, case: VerifyCase, leave_out: str = ""):
        self.pool, self.case, self.leave_out = pool, case, leave_out
        self._scratch = ScratchFolder("verify")
        self._truth_files: dict[tuple[Any, ...], Path] = {}
        self._tolerances: dict[Path, DerivedTolerance] = {}
        self._collective_skipped = False

    def report(self, layouts: Iterable[Layout], progress: Callable[[LayoutVerdict], None] = lambda _: None) -> Report:
        verdicts = []
        for layout in layouts:
            verdicts.append(self.verify_layout(layout))
            progress(verdicts[-1])
        if not verdicts:
            raise ValueError('verify has no layout; name one, such as "dp=2"')
        if self.leave_out and not self._collective_skipped:
            raise ValueError(
                f"no layout issues the collective to leave out ({self.leave_out}); name one that they issue"
            )
        return Report(verdicts=tuple(verdicts))

    def verify_layout(self, layout: Layout) -> LayoutVerdict:
        started, run = time.perf_counter(), case_for_layout(self.case, layout)
        case, ran = run.case, with_two_sequences(run.layout)
        differences: list[Difference] = []
        is_hf = isinstance(case.model, str) and is_hf_model(case.model)
        trouble = "; ".join(map(str, find_hf_layout_issues(str(case.model), ran))) if is_hf else ""
        is_refused = bool(trouble)
        try:
            differences = [] if is_refused else self._differences(case, ran)
        except RankError as error:
            trouble = _describe(error)
        allowed = _exact if is_refused else self._allowed(case, ran)
        wrong = [difference for difference in differences if _excess(difference, allowed) > 1]
        nearest = max(differences, key=lambda difference: _excess(difference, allowed), default=None)
        return LayoutVerdict(
            layout=str(layout),
            passed=not wrong and not trouble,
            max_error=float("inf") if trouble else max(difference.error for difference in differences),
            max_relative=nearest.relative if nearest else float("inf"),
            tolerance=allowed(nearest) if nearest else RELATIVE_TOLERANCE,
            first_difference=wrong[0] if wrong else None,
            axis=self._find_wrong_axis(case, ran) if wrong else "",
            seconds=time.perf_counter() - started,
            trouble=trouble,
            untested=_untested(differences, allowed),
            ran=str(ran),
            folded=run.folded.changes,
            model=run.model,
            replaced=run.replaced,
        )

    def _differences(self, case: VerifyCase, layout: Layout) -> list[Difference]:
        arguments = (_with_enough_steps(case, layout), str(layout), self.leave_out, self._truth_file(case, layout))
        timeout = timeout_for(layout)
        reports: list[RankReport] = self.pool.run(run_and_compare, layout.world, *arguments, timeout=timeout)
        self._collective_skipped |= any(report.collective_skipped for report in reports)
        largest: dict[tuple[int, str, str], Difference] = {}
        for difference in (difference for report in reports for difference in report.differences):
            key = (difference.step, difference.kind, difference.name)
            other = largest.get(key, difference)
            error, relative = max(other.error, difference.error), max(other.relative, difference.relative)
            largest[key] = replace(difference, error=error, relative=relative)
        sizes = {name: size for report in reports for name, size in report.parameter_elements.items()}
        order = {name: index for index, name in enumerate(reports[0].parameter_names)}
        for name in order:
            owned = sum(report.owned_elements.get(name, 0) for report in reports)
            if owned != sizes.get(name):
                wrong = f"{name} has {sizes.get(name, 0)} elements and {owned} are owned: the placement is wrong"
                raise RankError(wrong, rank=0, reason=wrong)
        # Causes first: a wrong gradient makes the update wrong, and a parameter tells more than a norm.
        kinds = ("gradient", "parameter", "average", "buffer", "norm", "loss")
        return sorted(largest.values(), key=lambda d: (d.step, kinds.index(d.kind), order.get(d.name, 0)))

    def _truth_file(self, case: VerifyCase, layout: Layout) -> Path:
        """The file with what one device computes; for asynchronous schedules by their own rule."""
        rule = (layout.schedule, layout.pp) if layout.schedule in ASYNC_SCHEDULES else ()
        key = (case.model, case.seq_len, case.optimizer, layout.batch, layout.accumulate, *rule)
        if key not in self._truth_files:
            path = self._scratch.path / f"{len(self._truth_files)}.safetensors"
            if rule:
                arguments = (_with_enough_steps(case, layout), str(layout), path)
                self.pool.run(write_emulation, 1, *arguments, timeout=timeout_for(layout))
            else:
                self.pool.run(write_truth, 1, case, layout.batch, layout.accumulate, path, timeout=TIMEOUT)
            self._truth_files[key] = path
        return self._truth_files[key]

    def _allowed(self, case: VerifyCase, layout: Layout) -> Tolerance:
        """Return what each quantity may be off by."""
        if case.is_float64:
            return _exact
        truth = self._truth_file(case, layout)
        if truth not in self._tolerances:
            arguments = (case, layout.batch, layout.accumulate, truth)
            draws = [
                self.pool.run(reference_errors, 1, *arguments, draw, timeout=TIMEOUT)[0]
                for draw in range(num_draws(case))
            ]
            self._tolerances[truth] = DerivedTolerance(
                case, chain.from_iterable(draws), num_tokens=layout.batch * case.seq_len
            )
        return self._tolerances[truth]

    def _find_wrong_axis(self, case: VerifyCase, layout: Layout) -> str:
        """The axes that fail alone: splitting over one axis at a time finds the wrong reduction."""
        shards, replicas = layout.num_shards, layout.dp // layout.num_shards
        none: dict[str, dict[str, int | str]] = {
            "dp": {"dp": 1, "zero": 0, "shard": 1},
            "tp": {"tp": 1, "sp": 0, "tp_kind": "1d", "depth": 1},
            "cp": {"cp": 1, "cp_kind": "ring", "ulysses": 1},
            "pp": {"pp": 1, "schedule": "1f1b", "vpp": 1},
            "ep": {"ep": 1, "etp": 1, "ep_inner": 1},
        }

        def only(axis: str, **keys: int) -> Layout:
            others = {key: value for name, left in none.items() if name != axis for key, value in left.items()}
            return layout.replace(**{**others, **keys})

        alone = {
            **{axis: only(axis) for axis in ("pp", "tp")},
            "cp": only("cp", zero=layout.zero),
            "ep": only("ep", dp=layout.ep * layout.etp),
            "shard": only("dp", dp=shards, shard=shards, zero=layout.zero),
            "replica": only("dp", dp=replicas, shard=replicas, zero=0),
        }
        names = {axis: part for axis, part in alone.items() if part.world > 1}
        failing = [axis for axis, part in names.items() if self._fails(case, part)] if len(names) > 1 else []
        hybrid, wrong_axes = 1 < layout.num_shards < layout.dp, failing or names
        return " x ".join(axis if hybrid or axis in ("tp", "cp", "pp", "ep") else "dp" for axis in wrong_axes)

    def _fails(self, case: VerifyCase, layout: Layout) -> bool:
        layout = with_two_sequences(layout)
        try:
            allowed, differences = self._allowed(case, layout), self._differences(case, layout)
            return any(_excess(difference, allowed) > 1 for difference in differences)
        except RankError:
            return True


def timeout_for(layout: Layout) -> float:
    """Seconds that the ranks of a layout may take: 48 stages with 16 microbatches take 85 on two idle cores."""
    passes = layout.pp * layout.vpp * layout.accumulate if layout.pp > 1 else 0
    return TIMEOUT * max(1.0, passes / USUAL_PASSES)


def _with_enough_steps(case: VerifyCase, layout: Layout) -> VerifyCase:
    """The case with about as many updates for every schedule: rounding errors grow with each of them."""
    updates = updates_per_step(layout)
    return replace(case, steps=max(-(-case.steps // updates), min(case.steps, 3)))


def _describe(error: RankError) -> str:
    """The sentences of a refusal; of any other failure, the rank and its traceback."""
    failure = error.failure
    if failure is not None and failure.user_errors and is_refusal(failure.modules):
        return "\n".join(failure.user_errors)
    return str(error)


def _exact(difference: Difference) -> float:
    """In float64, both errors have a tolerance: the absolute one is stated as a relative one."""
    return RELATIVE_TOLERANCE


def _untested(differences: Sequence[Difference], allowed: Tolerance) -> tuple[str, ...]:
    """Return the parameters of which no step's update is compared: one that is left out is off by 1."""
    strictest: dict[str, float] = {}
    for difference in (each for each in differences if each.kind == "parameter"):
        strictest[difference.name] = min(strictest.get(difference.name, math.inf), allowed(difference))
    return tuple(name for name, tolerance in strictest.items() if tolerance >= 1)


def _excess(difference: Difference, allowed: Tolerance) -> float:
    """Return the error as a multiple of what is allowed."""
    excess = difference.relative / allowed(difference)
    return max(excess, difference.error / TOLERANCE) if allowed is _exact else excess


def with_two_sequences(layout: Layout) -> Layout:
    """The layout with at least two sequences per rank and microbatch, so that a wrong mean over sequences shows."""
    return replace(layout, microbatch=2) if layout.microbatch == 1 else layout
