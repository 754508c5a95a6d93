"""`echelon export RUN`: what a run has trained, whatever its layout was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import small
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config.run_config import Config
from echelon.training.loop import train_on_rank


def export(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", *map(str, words), "--json"])
    return done.exit_code, done.stdout


def config(folder: Path, layout: str, **changes: object) -> Config:
    usual = {"model": "llama-tiny", "steps": 3, "checkpoint.every": 2, "optimizer.ema": 0.5}
    return small(folder, layout, **{**usual, **changes})


def train(asked: Config) -> None:
    train_on_rank(asked, True)


def test_of_any_layout(pool, tmp_path):
    found = {}
    for layout, world in (("dp=1", 1), ("dp=2,tp=2,zero=1", 4)):
        folder = tmp_path / str(world)
        folder.mkdir()
        pool.run(train, world, config(folder, layout))
        code, text = export(folder / "run", folder / "out")
        assert code == 0, text
        assert json.loads(text)["checked"] == "transformers"
        assert export(folder / "run", folder / "average", "--average")[0] == 0
        assert export(folder / "run" / "checkpoints" / "step-00000002", folder / "before")[0] == 0
        for name in ("out", "average", "before"):
            found[name, world] = load_file(folder / name / "model.safetensors")
    for name in ("out", "average", "before"):
        one, many = found[name, 1], found[name, 4]
        assert one.keys() == many.keys()
        assert all(torch.allclose(one[key], many[key], atol=2e-6) for key in one)
    head = {name: found[name, 1]["lm_head.weight"] for name in ("out", "average", "before")}
    assert (head["out"] - head["before"]).abs().max() > 1e-4
    assert (head["out"] - head["average"]).abs().max() > 1e-4


def test_what_cannot_be(tmp_path):
    train(config(tmp_path, "dp=1", **{"optimizer.ema": 0}))
    run = tmp_path / "run"
    code, text = export(run, tmp_path / "out", "--average")
    assert (code, "has no averaged weights" in text) == (2, True)
    part = run / "checkpoints" / "step-00000003" / "part-00000.safetensors"
    whole = bytearray(part.read_bytes())
    index = json.loads((part.parent / "index.json").read_text())
    whole[index["tensors"]["model.head.weight"]["slices"][0]["at"] + 100] ^= 1
    part.write_bytes(whole)
    code, text = export(run, tmp_path / "out")
    assert (code, "part-00000.safetensors: bytes have changed" in text) == (2, True)
    assert not (tmp_path / "out").exists()
    assert export("llama-tiny", tmp_path / "out", "--average")[0] == 2


def test_a_run_without_a_checkpoint(tmp_path):
    train(config(tmp_path, "dp=1", **{"checkpoint.every": 0, "steps": 1}))
    code, text = export(tmp_path / "run", tmp_path / "out")
    assert (code, "no checkpoint found" in text) == (2, True)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_no_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, text = export(name, "out")
    assert code == 2
    assert "is neither a run, a checkpoint" in text
