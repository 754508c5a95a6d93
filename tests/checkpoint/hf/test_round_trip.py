"""A model of transformers' own comes in, computes the same, and goes out to the same names, shapes and values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import MODELS, build, load, logits, save, tokens
from safetensors.torch import load_file

from echelon import models
from echelon.checkpoint.hf import convert_model, logit_check, safetensors_reader, safetensors_writer
from echelon.checkpoint.hf.convert_model import export_model, import_model
from echelon.checkpoint.hf.convert_tensors import in_memory, native_to_hf
from echelon.models import find_model, reduced_config
from echelon.models.hf import hf_config_reader, hf_config_writer
from echelon.planning.model.model_sources import resolve_shape


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read by safetensors itself."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def differ(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out(name: str, tmp_path: Path) -> None:
    model = build(name)
    source = save(model, tmp_path / "theirs", max_shard_size="10KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    done = import_model(source, tmp_path / "ours", max_shard_bytes=20_000)
    assert done.model.model_type == MODELS[name][0]
    assert done.model.config.parameters == sum(p.numel() for p in model.parameters())
    for folder in (source, tmp_path / "ours"):  # planning counts alike
        assert resolve_shape(str(folder)).parameters == done.model.config.parameters
    tensors, wanted = safetensors_reader.open_safetensors(tmp_path / "ours"), logits(model)
    assert float(wanted.std()) > 0.1
    assert differ(logit_check.native_logits(done.model.config, tensors, tokens()), wanted) < 1e-5
    back = export_model(str(tmp_path / "ours"), tmp_path / "back", max_shard_bytes=15_000)
    assert back.check is not None
    assert back.check.against == "transformers"
    assert back.check.error < 1e-5
    # What save_pretrained wrote, bit by bit: names, shapes, types and values.
    before, after = stored(source), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    again, reported = load(tmp_path / "back")
    assert not any(reported[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert torch.equal(logits(again), wanted)
    assert hf_config_reader.read_hf_config(tmp_path / "back").config == replace(done.model.config, name="back")


def test_gpt2_in_float64(tmp_path: Path) -> None:
    """Other kinds' norms and angles are float32 in transformers, whatever the model's type is."""
    model = build("gpt2").double()
    done = import_model(save(model, tmp_path / "theirs"), tmp_path / "ours")
    found = logit_check.native_logits(
        done.model.config, safetensors_reader.open_safetensors(tmp_path / "ours"), tokens(), torch.float64
    )
    assert done.dtype == "float64"
    assert differ(found, logits(model)) < 1e-9


OWN = ("gpt-tiny", "llama-tiny", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


@pytest.mark.parametrize("name", OWN)
def test_models_of_our_own_go_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    small = replace(reduced_config(find_model(name)), name=name, layers=2)
    if small.moe is not None and small.moe.shared_ffn:
        small = replace(small, moe=replace(small.moe, shared_ffn=2 * small.moe.ffn))
    monkeypatch.setattr(convert_model, "SIZES", {name: small})
    done = export_model(name, tmp_path / "out", seed=3)
    assert done.check is not None
    assert done.check.against == "transformers"
    assert import_model(tmp_path / "out", tmp_path / "in", with_check=True).check is not None
    assert done.model.config.parameters == small.parameters


def test_a_model_with_no_kind_of_theirs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model that computes switch-tiny"):
        export_model("switch-tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_types(name: str, tmp_path: Path) -> None:
    source = save(build(name), tmp_path / "theirs")
    done = import_model(source, tmp_path / "ours", dtype="bfloat16", with_check=True)
    assert done.dtype == "bfloat16"
    kinds = {key: x.dtype for key, x in safetensors_reader.open_safetensors(tmp_path / "ours").items()}
    assert {key for key, kind in kinds.items() if kind != torch.bfloat16} == {
        k for k in kinds if k.endswith("gate.bias")
    }
    # Each tensor keeps its own type on the way out.
    back = export_model(str(tmp_path / "ours"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert back.dtype == "bfloat16"
    exact = stored(source)
    for key, tensor in stored(tmp_path / "back").items():
        assert torch.equal(tensor, exact[key].to(tensor.dtype))


def test_tensors_that_become_one_keep_the_wider_dtype() -> None:
    config = reduced_config(find_model("gpt-tiny"), layers=1, width=16)
    state = models.build(config).state_dict()
    q, k, v = (f"blocks.0.attn.{part}.weight" for part in "qkv")
    state[q] = state[q].bfloat16()
    conversion = native_to_hf({name: in_memory(tensor) for name, tensor in state.items()}, config)
    merged = dict(conversion.convert())["transformer.h.0.attn.c_attn.weight"]
    assert merged.dtype == torch.float32
    assert torch.equal(merged.T, torch.cat([state[q].float(), state[k], state[v]]))


def test_older_files(tmp_path: Path) -> None:
    """GPT-2 as it was published: no first part of the names, masks beside the weights, one file."""
    from safetensors.torch import save_file

    model = build("gpt2")
    source = save(model, tmp_path / "theirs")
    old = {key.removeprefix("transformer."): x for key, x in stored(source).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    save_file(old, source / "model.safetensors")
    done = import_model(source, tmp_path / "ours")
    found = logit_check.native_logits(
        done.model.config, safetensors_reader.open_safetensors(tmp_path / "ours"), tokens()
    )
    assert differ(found, logits(model)) < 1e-5


def test_older_configs() -> None:
    """Before transformers 5: rope_theta by itself, and no number of key heads."""
    given = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "rope_theta": 777.0}
    given |= {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64, "rope_scaling": None}
    config = hf_config_reader.parse_hf_config(given, "old").config
    assert (config.theta, config.kv_heads, config.epsilon) == (777.0, 4, 1e-6)


LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_written(name: str) -> None:
    """As they lie on the hub, by hand: the model has as many parameters as is published."""
    parameters, given = PUBLISHED[name]
    saved = hf_config_reader.parse_hf_config(given, name)
    assert saved.config.parameters == parameters
    written = hf_config_writer.hf_config(saved, "bfloat16")
    assert hf_config_reader.parse_hf_config(written, name) == saved
    assert written["model_type"] == given["model_type"]
    assert written["architectures"] == given["architectures"]


def test_slices_are_read_alone(tmp_path: Path) -> None:
    export_model("gpt-tiny", tmp_path / "out")
    lazy = safetensors_reader.open_safetensors(tmp_path / "out")["transformer.wte.weight"]
    assert lazy.shape == (257, 64)
    assert torch.equal(lazy[3:5, 10:20], lazy.read()[3:5, 10:20])


def test_shards_are_divided_by_size() -> None:
    specs = [
        safetensors_writer.SafetensorSpec(str(i), (size,), torch.bfloat16) for i, size in enumerate((10, 10, 50, 1, 1))
    ]
    found = safetensors_writer.split_into_shards(specs, max_shard_bytes=40)
    assert [[spec.name for spec in group] for group in found] == [["0", "1"], ["2"], ["3", "4"]]
