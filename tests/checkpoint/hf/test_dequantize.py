"""A published DeepSeek-V3 folder: YaRN in `rope_scaling`, weights in fp8 with a scale for each block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import build, logits, save, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from echelon.checkpoint.hf.convert_model import export_model, import_model
from echelon.checkpoint.hf.convert_tensors import in_memory
from echelon.checkpoint.hf.dequantize import dequantised
from echelon.checkpoint.hf.logit_check import native_logits
from echelon.checkpoint.hf.safetensors_reader import open_safetensors
from echelon.cli import app
from echelon.models.hf.hf_config_reader import read_hf_config
from echelon.models.model_dir import read_model_dir

BLOCK = 16
"""several blocks of each weight, some of them cut off"""
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def quantise(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """fp8, its scales, and what they stand for: block by block, as the paper describes it."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scales = torch.empty(rows, columns)
    fp8, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = weight[at].abs().max() / 448
            fp8[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[at] = fp8[at].float() * scales[i, j]
    return fp8, scales, exact


def is_quantised(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder as DeepSeek publishes one, and transformers' model with the dequantised weights."""
    target = tmp_path_factory.mktemp("published")
    model = build("deepseek_v3 yarn").to(torch.bfloat16)
    save(model, target)
    written, exact = {}, {}
    for name, tensor in load_file(target / "model.safetensors").items():
        if is_quantised(name, tensor):
            written[name], written[name + "_scale_inv"], exact[name] = quantise(tensor.float(), BLOCK)
        else:
            written[name] = exact[name] = tensor
    # The layer that predicts further tokens, which is not imported.
    fp8, scales, _ = quantise(torch.ones(8, 8), BLOCK)
    written |= {"model.layers.2.eh_proj.weight": fp8, "model.layers.2.eh_proj.weight_scale_inv": scales}
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    config["quantization_config"] = FP8
    (target / "config.json").write_text(json.dumps(config))
    return target, exact


def test_a_published_folder_is_imported(folder: tuple[Path, Any], tmp_path: Path) -> None:
    """With the dtype of the weights that are not quantised, each value rounded once."""
    source, exact = folder
    result = import_model(source, tmp_path / "native", with_check=True)
    assert result.dtype == "bfloat16"
    assert result.check is not None
    assert (result.check.against, result.check.error < 1e-5) == ("transformers", True)
    native = open_safetensors(tmp_path / "native")
    down = exact["model.layers.0.mlp.down_proj.weight"].to(torch.bfloat16)
    assert torch.equal(native["blocks.0.mlp.down.weight"].read(), down)
    assert not any("scale_inv" in name for name in native)


def test_in_float32_nothing_is_rounded_and_logits_are_those_of_transformers(
    folder: tuple[Path, Any], tmp_path: Path
) -> None:
    source, exact = folder
    import_model(source, tmp_path / "native", dtype="float32", with_check=True)
    config = read_model_dir(tmp_path / "native").config
    theirs = build("deepseek_v3 yarn")
    names = theirs.state_dict().keys()
    plain = {name: value.float() for name, value in exact.items() if name in names}
    experts = [name for name in names if ".experts." in name and "shared" not in name]
    for name in experts:
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        each = [torch.cat([exact[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(8)]
        plain[name] = torch.stack(each).float()
    theirs.load_state_dict(plain)
    ours = native_logits(config, open_safetensors(tmp_path / "native"), tokens())
    assert torch.allclose(ours, logits(theirs), rtol=1e-4, atol=1e-4)


def test_the_exported_config_has_yarn_and_no_quantisation(folder: tuple[Path, Any], tmp_path: Path) -> None:
    import_model(folder[0], tmp_path / "native")
    export_model(str(tmp_path / "native"), tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config
    assert {"rope_type": "yarn", "mscale": 0.8, "mscale_all_dim": 1.2}.items() <= config["rope_scaling"].items()
    assert read_hf_config(tmp_path / "again").config.rope_scaling == read_hf_config(folder[0]).config.rope_scaling
    assert read_model_dir(tmp_path / "native").config.rope_scaling == read_hf_config(folder[0]).config.rope_scaling


def test_weights_that_are_not_quantised_are_read_whatever_the_config_says(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    assert import_model(tmp_path / "theirs", tmp_path / "native", with_check=True).dtype == "float32"


def test_the_command_says_what_a_folder_lacks(folder: tuple[Path, Any], tmp_path: Path) -> None:
    """fp8 without a quantization_config, without scales, or with scales of other blocks."""
    source, _ = folder
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    for change, tensors, words in (
        ({"quantization_config": None}, weights, "weights of unsupported dtypes"),
        ({}, {name: x for name, x in weights.items() if name != scale}, "without scales: model.layers.0.mlp.down"),
        ({}, {**weights, scale: weights[scale][:1]}, "scales that do not fit blocks of 16 x 16: model.layers.0"),
        ({}, {**weights, scale: weights[scale] * torch.nan}, "not finite (model.layers.0.mlp.down_proj.weight)"),
        ({}, {**weights, "extra_scale_inv": weights[scale].clone()}, "scales of no quantised weight: extra_scale_inv"),
    ):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.json").write_text(json.dumps({**config, **change}))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, broken / "model.safetensors")
        shown = CliRunner().invoke(app, ["import", str(broken), str(tmp_path / "never")])
        assert shown.exit_code == 2
        assert words in " ".join(shown.output.split())
        assert not (tmp_path / "never").exists()


def test_published_blocks_of_128() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    fp8, scales, exact = quantise(weight, 128)
    sources = {"a.weight": in_memory(fp8), "a.weight_scale_inv": in_memory(scales)}
    found = dequantised(sources, (128, 128))
    assert list(found) == ["a.weight"]
    assert torch.equal(found["a.weight"].read(), exact)
    assert found["a.weight"].dtype == torch.bfloat16, "as DeepSeek's own script"
    assert float((exact - weight).abs().max()) < 0.2
