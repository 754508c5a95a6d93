"""With any pipeline the console shows the true loss, as one device would."""

from __future__ import annotations

import dataclasses

import pytest

from echelon import data
from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, EvalConfig, SampleConfig
from echelon.layout import Layout
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run

LAYOUTS = ("pp=2,accumulate=2", "pp=4,accumulate=1", "pp=2,schedule=dualpipe-v,accumulate=4", "tp=2,pp=2,accumulate=2")


def lines_of(pool, config, layout):
    config = dataclasses.replace(config, layout=layout)
    found = pool.run(train_on_rank, Layout.parse(layout).world, config, False)
    assert all(other.loss == found[0].loss for other in found), "equal on every rank"
    return [record["loss"] for record in Run.open(found[0].run).records("step")]


def test_the_console_shows_the_true_loss(pool, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(900)))
    tokens = data.prepare_token_file(tmp_path / "text.txt", tmp_path / "cache", tokenizer=data.load_tokenizer("bytes"))
    config = Config(
        data=DataConfig(path=(str(tokens),)),
        seq_len=32,
        batch=4,
        steps=3,
        dtype="float64",
        sample=SampleConfig(tokens=0),
        eval=EvalConfig(every=0),
        run=str(tmp_path / "run"),
    )
    truth = lines_of(pool, config, "dp=1")
    for layout in LAYOUTS:
        assert lines_of(pool, config, layout) == pytest.approx(truth, abs=1e-10), layout
