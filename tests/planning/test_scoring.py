"""The planner against runs that others measured: the bars that it is held to, and how it is counted."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.planning.calibrate import published_runs
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.calibrate.scoring import fit_accuracy, score_runs

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "bench" / "published" / "measurements.csv"
UNSEEN = TABLE.with_name("unseen.csv")
QUOTED = json.loads(TABLE.with_name("accuracy.json").read_text(encoding="utf-8"))
RENEW = "run python bench/fit.py bench/published/measurements.csv --accuracy, then python docs/tables.py"


@pytest.fixture(scope="module")
def found():
    return score_runs(*published_runs.parse_runs(published_runs.read_runs(TABLE)))


def test_step_times_are_within_the_bars(found):
    assert found.time_median <= 0.08
    assert found.time_p90 <= 0.20


def test_the_interval_covers_what_it_says(found):
    assert 0.70 <= found.coverage <= 0.90
    assert found.half_width <= 0.25


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return __import__("fit")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_the_docs_quote_the_errors_of_the_fitted_table(found, fit):
    assert fit.score_summary(found) == QUOTED["fitted"], RENEW


def test_the_docs_quote_the_errors_on_sources_that_nothing_was_fitted_to(fit):
    fitted = {row["source_id"] for row in published_runs.read_runs(TABLE)}
    rows = published_runs.read_runs(UNSEEN)
    assert fitted.isdisjoint(row["source_id"] for row in rows)
    assert fit.score_summary(score_runs(*published_runs.parse_runs(rows))) == QUOTED["unseen"], RENEW


@pytest.mark.soak
def test_the_docs_quote_the_errors_on_sources_left_out(fit):
    runs, _ = published_runs.parse_runs(published_runs.read_runs(TABLE))
    assert fit.time_summary(fit.leave_out([run for run in runs if run.seconds])) == QUOTED["left out"], RENEW


def test_the_layout_study_is_predicted(found):
    study = found.sources["aleph_layouts"]
    assert study.fit_accuracy >= 0.93
    assert study.regret <= 0.05


def test_a_memory_model_with_one_answer_is_half_right():
    """Balanced: out of memory, whatever the run, is right about those that were and wrong about those that fitted."""
    runs, _ = published_runs.parse_runs(published_runs.read_runs(TABLE))
    study = [run for run in runs if run.source == "aleph_layouts"]
    assert fit_accuracy(study, replace(FITTED_CONSTANTS, context_gib=1e4)) == 0.5
    assert fit_accuracy([run for run in study if not run.out_of_memory]) is None


def test_published_runs_are_of_other_programs():
    assert {
        question.scenario.program for question in published_runs.parse_runs(published_runs.read_runs(TABLE))[0]
    } == {"others"}


def test_usable_rows_are_not_skipped(found):
    """Rows of fine-tuning, of truncated models, and without a shape, a layout or a time are all that is left out."""
    assert sum(found.skipped.values()) < 110
    assert set(found.skipped) == {"no hidden", "no pp", "no time", "fine-tuning", "a truncated model"}


def test_there_are_few_constants():
    """At most 40 are fitted; the share of processors is stated, not fitted."""
    assert len(fields(Constants)) - len({"cpu"}) <= 40


def test_times_scale_with_what_was_measured(tmp_path):
    """A table whose runs took twice as long has errors of a half: the score can be bad."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        some = [row for row in reader if row["source_id"] == "zero_bubble"]
        names = reader.fieldnames
    for row in some:
        row["tokens_per_s_per_gpu"] = str(float(row["tokens_per_s_per_gpu"]) / 2)
    slow = tmp_path / "slow.csv"
    with open(slow, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(some)
    assert score_runs(*published_runs.parse_runs(published_runs.read_runs(slow))).time_median == pytest.approx(
        0.5, abs=0.05
    )


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00"])
def test_a_table_that_is_none_is_refused(tmp_path, text):
    table = tmp_path / "table.csv"
    table.write_text(text)
    result = CliRunner().invoke(app, ["score", str(table)])
    assert result.exit_code == 2
    assert "table" in result.stderr
    assert CliRunner().invoke(app, ["score", str(tmp_path / "none.csv")]).exit_code == 2
