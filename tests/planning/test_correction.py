"""A run's measured.json corrects plans; one that cannot say by how much is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.layout import ValidationError
from echelon.planning.calibrate.correction import MEASURED_FILE, compare_prediction, format_measured, read_correction

PREDICTED = {"step_s": 0.25, "memory_bytes": 1 << 30}


def run_of(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / MEASURED_FILE).write_text(text)
    return str(folder)


def test_the_first_step_does_not_count():
    found = compare_prediction(PREDICTED, [9.0, 0.3, 0.2, 0.4], 5)
    assert found == {"step_s": 0.3, "memory_bytes": 5, "predicted": PREDICTED, "ratio": 0.3 / 0.25}
    assert format_measured(found) == "predicted 0.25 s a step, measured 0.3 s"
    assert compare_prediction(PREDICTED, [9.0], 5)["step_s"] == 9.0


def test_without_a_prediction_there_is_a_reason_and_no_ratio():
    found = compare_prediction({"reason": "unknown device"}, [1.0, 2.0], 5)
    assert found["ratio"] is None
    assert format_measured(found) == "measured 2.00 s a step; not predicted: unknown device"


WRONG = {
    "no file": (None, "is not a run that ended"),
    "no JSON": ("{", "damaged"),
    "no object": ("[]", "damaged"),
    "no ratio": ('{"predicted": {}}', "damaged"),
    "not predicted": ('{"ratio": null, "predicted": {"reason": "a module of your own"}}', "a module of your own"),
    "zero": ('{"ratio": 0, "predicted": {}}', "damaged"),
    "text": ('{"ratio": "1", "predicted": {}}', "damaged"),
    "infinite": ('{"ratio": Infinity, "predicted": {}}', "damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_cannot_say_is_refused(name, tmp_path):
    text, words = WRONG[name]
    run = run_of(tmp_path / "run", text) if text else str(tmp_path / "run")
    with pytest.raises(ValidationError, match=words):
        read_correction(run)


def planned(*options: str):
    done = CliRunner().invoke(app, ["plan", "llama-8b", "--cluster", "8xh100", "--top", "2", "--json", *options])
    return done, json.loads(done.stdout)


def test_plans_are_multiplied_and_say_so(tmp_path):
    run = run_of(tmp_path / "run", json.dumps({"ratio": 1.5, "predicted": PREDICTED}))
    _, plain = planned()
    done, found = planned("--correct", run)
    assert done.exit_code == 0
    for before, after in zip(plain["plans"], found["plans"], strict=True):
        assert after["layout"] == before["layout"]
        for key in ("step_s", "step_s_low", "step_s_high"):
            assert after[key] == pytest.approx(1.5 * before[key])
        assert after["memory_bytes"] == before["memory_bytes"]
        assert after["reasons"][0] == f"Times are corrected by 1.5, measured in {run}."
    _, one = planned("--correct", run, "--layout", "dp=8,zero=3")
    assert "corrected by 1.5" in one["plans"][0]["reasons"][0]


def test_all_issues_are_reported_at_once(tmp_path):
    done, found = planned("--correct", str(tmp_path), "--precision", "fp3")
    assert done.exit_code == 2
    assert len(found["errors"]) == 2


def test_measured_curves_are_not_corrected_twice(tmp_path):
    run = run_of(tmp_path / "run", json.dumps({"ratio": 1.5, "predicted": PREDICTED}))
    file = tmp_path / "mine.toml"
    file.write_text('[[part]]\nkind = "h100"\nnodes = 1\nper_node = 8\n[curves]\nmemory_tbps = 2.5\n')
    done = CliRunner().invoke(app, ["plan", "llama-8b", "--cluster", str(file), "--correct", run])
    assert done.exit_code == 2
    assert "leave out --correct" in done.stderr


def test_a_run_on_another_kind_of_device_is_refused(tmp_path):
    measured = compare_prediction({**PREDICTED, "device": "cpu"}, [0.3, 0.3], 5)
    (tmp_path / MEASURED_FILE).write_text(json.dumps(measured))
    done = CliRunner().invoke(app, ["plan", "llama-8b", "--cluster", "8xh100", "--correct", str(tmp_path)])
    assert done.exit_code == 2
    assert "ran on cpu" in done.stderr
