"""Runs with LoRA adapters: what they store, how they resume, and what they export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import small
from torch import Tensor
from typer.testing import CliRunner

from echelon import models
from echelon.checkpoint.hf.convert_model import export_model, import_model
from echelon.checkpoint.hf.convert_tensors import in_memory
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import ValidationError
from echelon.models.lora.add_lora import add_lora
from echelon.models.model_dir import SavedModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank
from echelon.training.run.resume import resumed_config
from echelon.training.start_training import load_config
from echelon.verification.verify_request import VerifyRequest

LORA = {"model": "llama-tiny", "lora.rank": 2, "lora.train": "norm1", "steps": 2, "checkpoint.every": 2}


def train(asked: Config, resume: str = "") -> None:
    train_on_rank(asked, True, (), resume)


def export(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", *map(str, words), "--json"])
    return done.exit_code, done.stdout


def last_state(run: Path) -> dict[str, Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    state: dict[str, Tensor] = {}
    for file in sorted(newest.glob("*.safetensors")):
        state |= load_file(file)
    return state


def test_a_checkpoint_has_what_is_trained_and_another_layout_resumes_it(pool: RankPool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small(tmp_path, "dp=1", name="whole", **{**LORA, "steps": 4}))
    pool.run(train, 2, small(tmp_path, "dp=2,zero=3", name="parts", **LORA))
    stored = last_state(parts)
    trained = {name for name in stored if name.startswith("model.")}
    assert all("lora" in name or "norm1" in name for name in trained)
    assert not any("attn.q.weight" in name for name in stored)
    pool.run(train, 2, resumed_config(parts, ["steps=4", "layout=tp=2"], world=2), str(parts))
    one, many = (dict(_exported(run, tmp_path)) for run in (whole, parts))
    assert one.keys() == many.keys()
    assert all(torch.allclose(one[name], many[name], atol=1e-5) for name in one)


def _exported(run: Path, folder: Path) -> dict[str, Tensor]:
    out = folder / f"{run.name}-adapter"
    code, text = export(run, out)
    assert code == 0, text
    return load_file(out / "adapter_model.safetensors")


def test_another_base_under_the_adapters_is_refused(tmp_path: Path) -> None:
    """A base that changed after the checkpoint would make everything wrong, and nothing fail."""
    base = _native_dir(tmp_path / "base", seed=1)
    train(small(tmp_path, "dp=1", **{**LORA, "model": str(base)}))
    run = tmp_path / "run"
    assert export(run, tmp_path / "merged", "--merge")[0] == 0
    base.rename(tmp_path / "old")
    _native_dir(base, seed=2)
    with pytest.raises(ValueError, match="the frozen weights differ from those"):
        train(resumed_config(run, ["steps=4"]), str(run))
    code, text = export(run, tmp_path / "other", "--merge")
    assert code == 2
    assert "the frozen weights differ" in text


def _native_dir(folder: Path, *, seed: int) -> Path:
    """An imported model, as `echelon import` writes it."""
    config = models.SIZES["llama-tiny"]
    state = models.build(config, seed=seed).state_dict()
    hf = folder.with_name(f"{folder.name}-hf-{seed}")
    export_model((SavedModel(config=config), {name: in_memory(value) for name, value in state.items()}), hf)
    import_model(hf, folder)
    return folder


def test_a_run_starts_from_the_adapters_of_another(tmp_path: Path) -> None:
    train(small(tmp_path, "dp=1", name="first", **{**LORA, "lora.train": []}))
    first = _exported(tmp_path / "first", tmp_path)
    start = {"lora.init": str(tmp_path / "first-adapter"), "lora.train": [], "optimizer.lr": 1e-12, "steps": 1}
    train(small(tmp_path, "dp=1", name="second", **{**LORA, **start}))
    second = _exported(tmp_path / "second", tmp_path)
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)
    with pytest.raises(ValidationError, match=r"lora.rank=4 is not that of the adapter to start from"):
        small(tmp_path, "dp=1", name="third", **{**LORA, **start, "lora.rank": 4})


def engine_bytes(layout: str) -> tuple[int, int, int]:
    """Bytes of optimizer states, master weights beside the parameters, and gradients, on this rank."""
    model = add_lora(models.build(models.SIZES["llama-tiny"], "meta"), rank=2)
    options = ParallelOptions(compute_dtype=torch.bfloat16)
    engine = Engine(model, layout, OptimizerConfig(), options=options)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    engine.step({"tokens": tokens, "targets": tokens})
    groups = engine.parallel.sharded_model.param_groups
    states = sum(t.nbytes for t in engine.optimizer.states() if t.dim())
    low = sum(group.master.low.nbytes for group in groups if hasattr(group.master, "low"))
    grads = sum(group.grads.tensor.nbytes for group in groups if group.grads.tensor is not None)
    return states, low, grads


@pytest.mark.parametrize(("layout", "shards"), [("dp=1", 1), ("dp=2", 1), ("dp=2,zero=1", 2)])
def test_frozen_weights_have_no_states_and_no_gradients(pool: RankPool, layout: str, shards: int) -> None:
    model = add_lora(models.build(models.SIZES["llama-tiny"], "meta"), rank=2)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    world = 2 if "dp=2" in layout else 1
    for states, low, grads in pool.run(engine_bytes, world, layout):
        assert states == 2 * 4 * numel // shards
        assert low == 2 * numel // shards
        assert grads == (4 if world > 1 else 2) * numel


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora.targets": "q_proj"}, "lora.targets=q_proj matches no linear of the model"),
        ({"lora.train": "nrm"}, 'did you mean "norm"?'),
        ({"lora.init": "nowhere"}, "lora.init=nowhere has no adapter_config.json"),
        ({"lora.rank": 0}, "has no effect with lora.rank=0"),
        ({"lora.rank": -1}, "lora.rank=-1 is out of range"),
        ({"layout": "tp=4,tp_kind=2d"}, "has no adapters on tensor grids (tp_kind=2d)"),
    ],
)
def test_a_wrong_key_is_refused_before_a_process_starts(settings: dict[str, Any], message: str) -> None:
    given = {"model": "llama-tiny", "lora.rank": 2, "lora.train": "norm1", "batch": 4, **settings}
    with pytest.raises(ValidationError) as raised:
        load_config(None, [f"{key}={value}" for key, value in given.items()], None)
    assert message in str(raised.value)


def test_a_pattern_of_the_verified_model_is_checked() -> None:
    """Of the model that --model names, and not of the configuration's default."""
    for model, target in (("gpt-tiny", "up"), ("llama-tiny", "gate")):
        VerifyRequest(model=model, settings=["lora.rank=2", f"lora.targets={target}"], layouts="dp=2").resolve()
    with pytest.raises(ValidationError, match=r"lora.targets=gate matches no linear"):
        VerifyRequest(model="gpt-tiny", settings=["lora.rank=2", "lora.targets=gate"], layouts="dp=2").resolve()


def test_a_resumed_run_keeps_its_adapters(tmp_path: Path) -> None:
    train(small(tmp_path, "dp=1", **LORA))
    with pytest.raises(ValidationError, match=r"lora.rank=4 cannot change when a run resumes"):
        resumed_config(tmp_path / "run", ["steps=4", "lora.rank=4"])


def test_json_of_an_export(tmp_path: Path) -> None:
    train(small(tmp_path, "dp=1", **{**LORA, "lora.targets": "q,v"}))
    code, text = export(tmp_path / "run", tmp_path / "out")
    assert code == 0
    layers = models.SIZES["llama-tiny"].layers
    assert json.loads(text)["adapters"] == 2 * layers
    assert export("llama-tiny", tmp_path / "plain", "--merge")[0] == 2
