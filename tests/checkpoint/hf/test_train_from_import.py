"""A run starts from an imported model: every rank reads its own slices, in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import whole
from typer.testing import CliRunner

from echelon import models
from echelon.checkpoint.hf import native_format, safetensors_reader
from echelon.checkpoint.hf.convert_model import export_model, import_model
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.models.language_model import LanguageModel
from echelon.models.model_config import find_model
from echelon.parallel.parallel_options import ParallelOptions
from echelon.planning.model.model_sources import resolve_shape
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank
from echelon.training.start_training import load_config


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """moe-tiny with the first values of another seed, in several files."""
    folder = tmp_path_factory.mktemp("stored")
    export_model("moe-tiny", folder / "theirs", seed=7)
    import_model(folder / "theirs", folder / "ours", max_shard_bytes=100_000)
    return folder / "ours"


def first(folder: str, layout: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """All parameters as the ranks hold them, and how many elements this rank read and holds."""
    read = []
    plain = safetensors_reader.LazyTensor.__getitem__

    def counted(self: safetensors_reader.LazyTensor, part: Any) -> torch.Tensor:
        found = plain(self, part)
        read.append(found.numel())
        return found

    safetensors_reader.LazyTensor.__getitem__ = counted  # type: ignore[method-assign]
    try:
        model = models.build(find_model(folder), "meta")
        assert isinstance(model, LanguageModel)
        native_format.init_from_dir(model, Path(folder))
        engine = Engine(model, layout, options=ParallelOptions(seed=1))
        record = engine.parallel.placement
        pieces = [record.piece(unit, entry) for unit in record.param_groups for entry in unit.params]
        return (
            whole(engine.parallel, "master"),
            sum(read),
            sum(b - a for piece in pieces for a, b in piece.unpadded_runs()),
        )
    finally:
        safetensors_reader.LazyTensor.__getitem__ = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "dp=2,zero=1,ep=2", "pp=2"])
def test_ranks_read_their_slices(layout: str, stored: Path, pool: Any) -> None:
    wanted = {
        name: tensor.double() for name, tensor in models.build(find_model("moe-tiny"), seed=7).state_dict().items()
    }
    found = pool.run(first, 2, str(stored), layout)
    merged = {name: tensor for part, *_ in found for name, tensor in part.items()}
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name].double(), wanted[name]) for name in wanted)
    assert all(read == held for _, read, held in found)


def test_a_command_starts_from_it(stored: Path, tmp_path: Path) -> None:
    import json

    words = ["train", "--set", f"model={stored}", "--set", "steps=1", "--set", "device=cpu", "--set", "seq_len=32"]
    done = CliRunner().invoke(app, [*words, "--set", f"run={tmp_path / 'run'}", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1


def test_the_directory_is_a_model_everywhere(stored: Path) -> None:
    # A file states the default of each gate option.
    wanted = replace(find_model("moe-tiny"), name="theirs", ffn=88, moe=find_model(str(stored)).moe)
    assert find_model(str(stored)) == wanted
    assert wanted.moe is not None
    assert wanted.moe.options == (("balance", 0.02),)
    assert resolve_shape(str(stored)).parameters == find_model("moe-tiny").parameters
    assert isinstance(load_config(None, [f"model={stored}"], 1), Config)


def test_what_changes_the_parameters_is_refused(stored: Path, tmp_path: Path) -> None:
    model = models.build(replace(find_model(str(stored)), tied=True), "meta")
    assert isinstance(model, LanguageModel)
    with pytest.raises(ValueError, match=r"do not match its directory .*head.weight.*leave out"):
        native_format.init_from_dir(model, stored)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a saved model .*'format' is missing"):
        find_model(str(tmp_path))


def test_buffers_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hugging_face_models import build, save

    import_model(save(build("deepseek_v3"), tmp_path / "theirs"), tmp_path / "ours")
    model = models.build(find_model(str(tmp_path / "ours")), "meta")
    assert isinstance(model, LanguageModel)
    native_format.init_from_dir(model, tmp_path / "ours")
    wanted = safetensors_reader.open_safetensors(tmp_path / "ours")["blocks.1.mlp.gate.bias"].read()
    assert wanted.abs().max() > 0
    assert torch.equal(model.get_buffer("blocks.1.mlp.gate.bias"), wanted)


def test_what_a_run_has_learnt_is_exported_whatever_its_layout_was(pool: Any, tmp_path: Path) -> None:
    """Only imported models and first values could be: a trained model stayed where it was."""
    from safetensors.torch import load_file

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n * n}; " for n in range(3000)))
    asked = {"data.path": f'["{text}"]', "seq_len": 16, "batch": 4, "steps": 2, "eval.every": 0, "sample.tokens": 0}
    asked |= {"checkpoint.every": 1, "device": "cpu", "model": "deepseek-tiny", "optimizer.lr": 1e-2}
    found = []
    for number, layout in enumerate(("dp=1", "dp=2,zero=3", "tp=2")):
        run = tmp_path / f"run{number}"
        config = Config.load(None, [f"{k}={v}" for k, v in {**asked, "layout": layout, "run": run}.items()])
        pool.run(train_on_rank, 1 if number == 0 else 2, config, True)
        done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / f"out{number}")])
        assert done.exit_code == 0, done.stderr
        assert "logits equal those of transformers" in done.stdout
        found.append(load_file(tmp_path / f"out{number}" / "model.safetensors"))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.allclose(other[name], value, atol=1e-4) for name, value in found[0].items())
    one = f"{tmp_path / 'run0'}/checkpoints/step-00000001"
    assert CliRunner().invoke(app, ["export", one, str(tmp_path / "one")]).exit_code == 0
    earlier = load_file(tmp_path / "one" / "model.safetensors")
    assert any(not torch.equal(earlier[name], value) for name, value in found[0].items())
    for part, said in ((b"x", "part-00000.safetensors"), (None, "no checkpoint of step")):
        path = Path(one) / "part-00000.safetensors"
        if part:
            path.write_bytes(path.read_bytes()[:-4] + b"abcd")
        else:
            one = one.replace("00000001", "00000007")
        done = CliRunner().invoke(app, ["export", one, str(tmp_path / "two")])
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
        assert not (tmp_path / "two").exists()
