"""Whole runs on one GPU, where results are read one step late and copies run beside compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import small

from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import LocalStorage
from echelon.config.run_config import Config
from echelon.faults import injection_spec
from echelon.faults.graceful_stop import EXIT_STATUS
from echelon.training.loop import train_on_rank
from echelon.training.run.resume import resumed_config
from echelon.training.run.run_dir import Run

STEPS = 12
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def config(folder: Path, name: str = "run", **changes: object) -> Config:
    usual = {"steps": STEPS, "checkpoint.every": 3, "schedule.warmup": 2, "dropout": 0.1, "dtype": "bfloat16"}
    return small(folder, "dp=1", name=name, text="ab" * 40000, **{**usual, "device": "cuda", **changes})


def train(config: Config, *inject: str, resume: str = "") -> str:
    return train_on_rank(config, True, injection_spec.parse_injections(inject), resume).run


def process(config: Config, *words: str) -> int:
    """A run in a process of its own: its exit status."""
    path = Path(config.run).parent / "asked.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "echelon", "train", str(path), *words], check=False).returncode


def state(run: str | Path) -> str:
    return open_index(LocalStorage(Path(run) / "checkpoints"), STEPS).hash


def losses(run: str | Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in Run.open(run).records("step")}


def records(run: str | Path, kind: str) -> list[dict[str, object]]:
    return list(Run.open(run).records(kind))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(config(tmp_path_factory.mktemp("undisturbed")))


def test_a_run_is_bit_reproducible(tmp_path: Path, undisturbed: str) -> None:
    assert state(train(config(tmp_path))) == state(undisturbed)


def test_a_killed_run_resumes_bit_equal(tmp_path: Path, undisturbed: str) -> None:
    assert process(config(tmp_path), "--inject", "kill:rank=0,step=8") != 0
    run = tmp_path / "run"
    train(resumed_config(run, []), resume=str(run))
    assert losses(run) == losses(undisturbed)
    assert state(run) == state(undisturbed)


def test_sigterm_saves_and_stops(tmp_path: Path, undisturbed: str) -> None:
    assert (
        process(config(tmp_path, **{"checkpoint.every": 0}), "--inject", "kill:rank=0,step=5,signal=SIGTERM")
        == EXIT_STATUS
    )
    run = tmp_path / "run"
    (stopped,) = records(run, "stopped")
    assert stopped["step"] in (5, 6, 7)
    assert LocalStorage(run / "checkpoints").steps() == [stopped["step"]]
    train(resumed_config(run, [f"checkpoint.every={STEPS}"]), resume=str(run))
    assert state(run) == state(undisturbed)


@pytest.mark.parametrize("at", [8, 9])
def test_a_spike_rolls_back(tmp_path: Path, at: int) -> None:
    changes = {"spike.action": "rollback", "spike.window": 7, "spike.factor": 1}
    struck = train(config(tmp_path, "struck", **changes), f"spike:step={at}")
    never = train(config(tmp_path, "never", **{"data.skip_batches": [at], **changes}))
    assert [record["after"] for record in records(struck, "rollback")] == [6]
    assert losses(struck) == losses(never)
    assert state(struck) == state(never)


LONG = {"replay.every": 2, "seq_len": 256, "batch": 2, "dropout": 0}
"""attention goes over several blocks, and its backward adds up in any order if it is let"""


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    struck = train(config(tmp_path, **LONG), "flip:rank=0,step=4,layer=blocks.1")
    (one,) = records(struck, "corruption")
    (began,) = one["began"]
    assert (one["step"], began["layer"], began["wrong"]) == (4, "blocks.1", 1)


@pytest.mark.parametrize("tolerance", [0, 1e-2])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "moe-tiny"])
def test_the_replay_check_has_no_false_positives(tmp_path: Path, model: str, tolerance: float) -> None:
    """Also of gradients that are 0 but for rounding."""
    assert not records(train(config(tmp_path, model=model, **LONG, **{"replay.tolerance": tolerance})), "corruption")
