from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from cpu_clock import cpu_seconds
from typer.testing import CliRunner

from echelon.bench.bench_device import BenchDevice
from echelon.bench.profile.breakdown import Breakdown, StepPart, from_json
from echelon.cli import app
from echelon.training.logging.metrics import PeakFlops

CONTRACT = {"shape", "seq", "batch", "precision", "step_s", "tokens_per_s", "mfu", "hfu", "peak_bytes", "peer", "ratio"}
H200 = BenchDevice(device_type="cuda", name="NVIDIA H200", memory=140 << 30, fp8=True)


def invoke(*args, **environment):
    return CliRunner().invoke(app, ["bench", *map(str, args)], env={"COLUMNS": "100", **environment})


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """A GPU with torchtitan installed, and invented measurements: by framework and precision, or one for all."""
    found: dict = {}

    def ask(module, request):
        return found.get((request.who, request.precision)) or found.get(module) or {"failed": "not in this test"}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.bench.bench_device.detect_device", lambda: H200)
    monkeypatch.setattr("echelon.bench.subprocess_bench.run_in_subprocess", ask)
    monkeypatch.setattr(
        "echelon.training.logging.metrics.peak_flops", lambda _: PeakFlops(flops=989.5e12, source="dense bf16 peak")
    )
    monkeypatch.setattr("echelon.bench.peers._can_import", lambda name, _: name.startswith("torch"))
    return found


def step(seconds: float, who: str) -> dict:
    versions = {"version": f"{who} 1.0", "torch": "2.11.0"}
    return {"step_s": seconds, "first_step_s": 12.0, "peak_bytes": 70 << 30, **versions}


def test_steps_on_this_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    begun = cpu_seconds()
    # One thread: two that wait for each other on busy cores take many times as long.
    done = invoke("--only", "steps", "--json", "--against", "none", OMP_NUM_THREADS="1")
    assert done.exit_code == 0, done.output
    assert cpu_seconds() - begun < 60
    found = json.loads(done.stdout)
    assert set(found) == {"rows", "left_out", "devices", "curves"}
    (row,) = found["rows"]
    assert row.keys() >= CONTRACT
    assert (row["shape"], row["who"], row["peer"], row["ratio"], row["failed"]) == ("tiny", "echelon", None, None, None)
    assert 0 < row["mfu"] == row["hfu"]
    assert row["tokens_per_s"] == pytest.approx(row["seq"] * row["batch"] / row["step_s"])
    assert row["first_step_s"] > row["step_s"]


def test_ratios_to_peers(answers):
    answers[("echelon", "bf16")] = step(0.5, "echelon")
    answers[("torchtitan", "bf16")] = step(0.55, "torchtitan")
    args = ("--only", "steps", "--shapes", "1b")
    done = invoke(*args, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["who"], row["precision"], row["peer"]) for row in rows] == [
        ("echelon", "bf16", "torchtitan"),
        ("compiled", "bf16", None),
        ("torchtitan", "bf16", None),
        ("echelon", "fp8", None),
        ("torchtitan", "fp8", None),
    ]
    assert rows[0]["ratio"] == pytest.approx(1.1)
    assert rows[1]["failed"] == rows[3]["failed"] == "not in this test"
    shown = invoke(*args)
    assert shown.exit_code == 0
    for words in (
        "1.10",
        "torchtitan",
        "failed: 1b, fp8, echelon: not in this test",
        "989.5 TFLOP/s",
        "left out: tran",
    ):
        assert words in shown.stdout


def test_nothing_of_ours_ran(answers):
    answers[("torchtitan", "bf16")] = step(0.55, "torchtitan")
    done = invoke("--only", "steps", "--shapes", "1b", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["failed"] == "not in this test"


def test_all_faults_at_once(monkeypatch):
    monkeypatch.setattr("echelon.bench.bench_device.detect_device", lambda: pytest.fail("it went on"))
    done = invoke("--only", "step", "--shapes", "1b,2b", "--steps", 0, "--states", "fp32", "--json")
    assert done.exit_code == 2
    assert [line.split("=")[0] for line in done.stderr.splitlines()] == ["--shapes", "--only", "--states", "--steps"]
    assert json.loads(done.stdout) == {"errors": done.stderr.splitlines()}


def test_a_profile_is_written_as_json_and_svg_and_shown(answers, tmp_path):
    parts = (StepPart(name="products", seconds=0.36, floor_s=0.34), StepPart(name="idle", seconds=0.01, floor_s=0.0))
    one = Breakdown(
        shape="1b",
        seq=4096,
        batch=8,
        precision="bf16",
        recompute="none",
        states="float32",
        device="NVIDIA H200",
        torch="2.11.0",
        step_s=0.37,
        copy=4.2e12,
        parts=parts,
        kernels=(),
    )
    answers["echelon.bench.profile.step_profile"] = asdict(one)
    done = invoke("--profile", tmp_path / "step.svg", "--shapes", "1b")
    assert done.exit_code == 0, done.output
    assert "a step takes 370.0 ms" in done.stdout
    assert from_json((tmp_path / "step.json").read_text()) == [one]
    assert "products" in (tmp_path / "step.svg").read_text()
    again = invoke("--profile", tmp_path / "step.json", "--shapes", "1b", "--json")
    assert json.loads(again.stdout)["profiles"][0]["shape"] == "1b"


def test_a_failed_profile_is_reported(answers, tmp_path):
    done = invoke("--profile", tmp_path / "step.svg", "--shapes", "8b")
    assert done.exit_code == 1
    assert "8b, bf16, echelon: not in this test" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_profile_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "echelon.bench.bench_device.detect_device", lambda: BenchDevice(device_type="cpu", name="cpu", memory=0)
    )
    done = invoke("--profile", tmp_path / "step.svg")
    assert done.exit_code == 2
    assert "requires a GPU" in done.stderr
