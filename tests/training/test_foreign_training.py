"""`model=hf:DIR`: trained on two ranks, saved, resumed and exported; models of transformers in a custom program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import VOCAB, build_family, write_family
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.layout.validation_error import ValidationError
from echelon.training.start_training import load_config

transformers = pytest.importorskip("transformers")
BYTES = 260
"""a vocabulary for the tokenizer of bytes"""


def train(run: Path, *settings: str, steps: int = 4, procs: int = 1) -> dict[str, Any]:
    given = ["batch=4", "seq_len=16", f"steps={steps}", "eval.every=0", "sample.tokens=0", "device=cpu", *settings]
    options = [text for setting in (f"run={run}", *given) for text in ("--set", setting)]
    result = CliRunner().invoke(app, ["train", "--procs", str(procs), "--json", *options])
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.output)
    return summary


def test_a_run_is_trained_on_two_ranks_and_exported(tmp_path: Path) -> None:
    """The exported directory is one that transformers loads: it predicts the text better than before."""
    model = write_family("phi3", tmp_path / "phi3", vocab_size=BYTES)
    trained = train(tmp_path / "run", f"model=hf:{model}", "layout=tp=2", "checkpoint.every=4", procs=2)
    assert trained["loss"] < 5.7
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model_type"] == "phi3"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "model.layers.0.self_attn.qkv_proj.weight" in loaded.state_dict()


def test_two_layouts_of_one_directory_train_alike(tmp_path: Path) -> None:
    """From the same weights on disk: one rank, and a pipeline of two; in float64."""
    torch.manual_seed(0)
    folder = tmp_path / "weights"
    own = build_family("llama")
    own.resize_token_embeddings(BYTES)
    own.save_pretrained(folder)
    losses = [
        train(tmp_path / name, f"model=hf:{folder}", f"layout={layout}", "dtype=float64", procs=procs)["loss"]
        for name, layout, procs in (("one", "dp=1", 1), ("two", "pp=2,accumulate=2", 2))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_untouched_weights_are_exported_as_they_were(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(1)
    build_family("gpt2").save_pretrained(tmp_path / "given")
    result = CliRunner().invoke(app, ["export", f"hf:{tmp_path / 'given'}", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_engine_takes_a_model_and_batches_in_words_of_transformers() -> None:
    """One step of SGD equals transformers' own loss and torch's own update."""
    torch.manual_seed(2)
    own, expected = build_family("qwen2"), build_family("qwen2")
    expected.load_state_dict(own.state_dict())
    ids = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(3))
    from echelon.config.sections import OptimizerConfig

    engine = ec.Engine(own, "dp=1", OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0))
    engine.model.train()
    result = engine.step({"input_ids": ids, "labels": ids})
    loss = expected.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    assert torch.allclose(engine.model.lm_head.weight, expected.lm_head.weight, atol=1e-6)


def test_wrap_leaves_a_users_loop_as_it_is() -> None:
    model = ec.wrap(build_family("qwen2"), "dp=1")
    ids = torch.randint(3, VOCAB, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert float(loss.detach()) > 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("dropout=0.1", "has no effect with a model of transformers"),
        ("seq_len=4096", "is longer than the model allows"),
        ("gate=switch", "has no effect with a model of transformers"),
    ],
)
def test_settings_that_the_config_decides_are_refused(setting: str, words: str, tmp_path: Path) -> None:
    model = write_family("llama", tmp_path)
    with pytest.raises(ValidationError, match=words):
        load_config(None, [f"model=hf:{model}", setting], 1)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    model = write_family("llama", tmp_path / "small")
    options = ["--set", f"model=hf:{model}", "--set", f"run={tmp_path / 'run'}", "--set", "device=cpu"]
    result = CliRunner().invoke(app, ["train", "--procs", "1", "--set", "seq_len=16", *options])
    assert result.exit_code != 0
    assert "has fewer tokens than the data" in result.output
