from __future__ import annotations

import subprocess
import sys

import pytest
from small_runs import small

import echelon as ec
from echelon.config.run_config import Config
from echelon.layout import ValidationError
from echelon.models.user_model import load_factory
from echelon.training import start_training
from echelon.training.elastic import supervisor
from echelon.training.run.run_dir import Run, RunError


def build():
    """Stands for a user's factory; a function `batch` is beside it."""


def batch(rows, step):
    """Stands for a user's batches."""


def test_settings_are_keys_with_an_underscore_for_the_dot():
    config = start_training.build_config(
        "gpt-tiny", {"optimizer_lr": 1e-3, "steps": 7, "data_mask_documents": True, "seq_len": 32}, None
    )
    assert (config.model, config.optimizer.lr, config.steps, config.seq_len) == ("gpt-tiny", 1e-3, 7, 32)
    assert config.data.mask_documents
    betas = start_training.build_config("gpt-tiny", {"optimizer_betas": (0.8, 0.9), "shard_units": ["blocks.*"]}, None)
    assert betas.optimizer.betas == (0.8, 0.9)
    assert betas.shard.units == ("blocks.*",)


def test_a_configuration_is_taken_as_it_is(tmp_path):
    assert start_training.build_config(Config(steps=3), {}, None) == Config(steps=3)
    (tmp_path / "c.toml").write_text("steps = 9\n")
    assert start_training.build_config(tmp_path / "c.toml", {"batch": 4}, None) == Config(steps=9, batch=4)


def test_a_function_becomes_its_file_and_name():
    config = start_training.build_config(build, {"layout": "dp=2"}, None)
    assert config.model == f"{__file__}:build"
    assert load_factory(config.model).__doc__ == build.__doc__


def test_a_function_that_ranks_cannot_import_is_refused():
    with pytest.raises(ValueError, match="define it at the top level of a file"):
        start_training.build_config(lambda: None, {}, None)


def test_wrong_settings_are_refused_all_at_once():
    with pytest.raises(ValidationError) as refused:
        ec.train("gpt-tinny", stepz=3, optimizer_lr=-1, layout="dp=2,zerro=1")
    text = str(refused.value)
    for word in ("gpt-tiny", '"steps"', "optimizer.lr=-1", '"zero"'):
        assert word in text


@pytest.mark.parametrize(("layout", "procs"), [("dp=2,tp=2", 4), ("tp=2", 2), ("dp=3,zero=1", 3), ("", 1)])
def test_as_many_ranks_as_the_layout_names(layout, procs):
    assert start_training.default_procs(Config(layout=layout, device="cpu")) == procs


def test_settings_beside_a_config_are_refused():
    with pytest.raises(ValueError, match=r"use dataclasses\.replace"):
        start_training.build_config(Config(), {"steps": 3}, None)


def test_train_is_a_function_after_any_import():
    code = "import echelon.config.run_config, echelon as ec; ec.Config; ec.train('nope')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "ValidationError: model=nope is an unknown model size" in done.stderr
    assert "torch" not in done.stderr


def test_a_run_that_is_running_is_refused_before_ranks_are_started(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "supervise", lambda *_, **__: pytest.fail("ranks were started"))
    asked = small(tmp_path, "dp=2")
    with Run.create(asked, {}) as held:
        assert held.lock()
        with pytest.raises(RunError, match="another process is training"):
            start_training.run_training(asked, resume=str(held.path))
