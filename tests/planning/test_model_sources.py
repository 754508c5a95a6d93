"""Shapes of named sizes and of Hugging Face configs: exactly as many parameters as the models have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models import SIZES, ModelConfig
from echelon.models.hf.hf_architectures import HF_ARCHITECTURES
from echelon.models.hf.hf_config_reader import parse_hf_spec
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.model_sources import config_shape, model_names, resolve_shape
from echelon.planning.model.transformer_shape import transformer_shape

DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
}
"""what the published config.json of our named mixtures say of their shapes"""
OURS = [name for name, config in SIZES.items() if config.family != "conv"]


def hf_shape(given: dict[str, Any], name: str) -> ModelShape:
    return transformer_shape(parse_hf_spec(given, name))


def faults(text: str) -> tuple[ValidationIssue, ...]:
    with pytest.raises(ValidationError) as caught:
        resolve_shape(text)
    return caught.value.issues


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_named_sizes_have_the_parameters_of_our_models(name: str) -> None:
    found, config = resolve_shape(name), SIZES[name]
    assert found.parameters == config.parameters
    assert found.name == name
    # The contract of MFU counts norms and biases among the parameters that multiply; there are few of them.
    assert found.train_flops(1024) == pytest.approx(
        config.flops_per_token(1024), rel=0.01 if "tiny" not in name else 0.1
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_with_grouped_queries_tied_and_untied(family: str, tied: bool) -> None:
    config = ModelConfig(
        name="x", family=family, layers=2, width=48, heads=6, kv_heads=2, ffn=40, vocab=13, max_seq_len=9, tied=tied
    )
    assert config_shape(config).parameters == config.parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gpt3-175b", 175e9, 175e9),
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("deepseek-v2", 235_741_434_880, 21e9),
        ("deepseek-v3", 671_026_404_352, 37e9),
    ],
)
def test_published_totals(name: str, total: float, active: float) -> None:
    found = resolve_shape(name)
    assert found.parameters == pytest.approx(total, rel=0.01 if name == "gpt3-175b" else 0)
    assert found.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_size_is_planned_as_its_published_config_is(name: str) -> None:
    """Layer by layer: products, parameters, widths of queries, keys and values, and what backward of others keeps."""
    found = resolve_shape(name)
    assert found.is_native  # of ours; a config is any program's
    plain = tuple((replace(layer, fused=None, unfused=None), count) for layer, count in found.layers)
    assert replace(found, layers=plain) == hf_shape(PUBLISHED[name], name)


def test_every_name_of_the_design_is_there() -> None:
    wanted = (
        "gpt-tiny gpt2-124m gpt2-1.5b gpt3-175b llama-tiny llama-1b llama-3b llama-8b llama-70b llama-405b moe-tiny"
    )
    assert {*wanted.split(), "mixtral-8x7b", "deepseek-v2", "deepseek-v3"} <= {*model_names()}
    assert all(resolve_shape(name).parameters > 0 for name in model_names())


def test_faults_of_names() -> None:
    (unknown,) = faults("lama-8b")
    assert (unknown.key, unknown.value) == ("model", "lama-8b")
    assert 'did you mean "llama-8b"?' in unknown.hint
    assert "deepseek-v3" in unknown.legal
    assert "convolutional" in faults("conv-tiny")[0].message
    assert "names no Python file" in faults("nothing.py:build")[0].message


def test_a_file_without_batches(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def build(): ...\n")
    assert "batch(rows, step)" in faults(f"{path}:build")[0].legal


# -- Hugging Face -----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 31,
}
Q, KV, OUT = 48 * 48, 2 * 48 * 16, 48 * 48
BLOCK = Q + KV + OUT + 3 * 48 * 100 + 2 * 48
OUTSIDE = 2 * 31 * 48 + 48


def of(base: dict[str, Any], **change: Any) -> ModelShape:
    return hf_shape({key: value for key, value in {**base, **change}.items() if value is not None}, "x")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, OUTSIDE + 3 * BLOCK),
        ({"tie_word_embeddings": True}, OUTSIDE - 31 * 48 + 3 * BLOCK),
        ({"num_key_value_heads": None}, OUTSIDE + 3 * (BLOCK - KV + 2 * 48 * 48)),
        ({"attention_bias": True}, OUTSIDE + 3 * (BLOCK + 48 + 2 * 16 + 48)),
        ({"mlp_bias": True}, OUTSIDE + 3 * (BLOCK + 100 + 100 + 48)),
        ({"head_dim": 4}, OUTSIDE + 3 * (BLOCK - Q // 2 - KV // 2 - OUT // 2)),
        ({"model_type": "mistral", "sliding_window": 4096}, OUTSIDE + 3 * BLOCK),
        ({"model_type": "phi3"}, OUTSIDE + 3 * BLOCK),
        ({"model_type": "qwen2"}, OUTSIDE + 3 * (BLOCK + 48 + 2 * 16)),
        ({"model_type": "qwen3", "head_dim": 8}, OUTSIDE + 3 * (BLOCK + 2 * 8)),
        ({"model_type": "gemma", "head_dim": 8}, OUTSIDE - 31 * 48 + 3 * BLOCK),
        ({"model_type": "gemma2", "head_dim": 8}, OUTSIDE - 31 * 48 + 3 * (BLOCK + 2 * 48)),
        ({"model_type": "gemma3_text", "head_dim": 8}, OUTSIDE - 31 * 48 + 3 * (BLOCK + 2 * 48 + 2 * 8)),
    ],
)
def test_parameters_of_llamas_relatives(change: dict[str, Any], expected: int) -> None:
    assert of(LLAMA, **change).parameters == expected


def test_parameters_of_gpt2_and_neox() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert of(gpt2).parameters == 124_439_808
    assert of(gpt2).tied
    assert of(gpt2, n_inner=1000).parameters == 124_439_808 - 12 * (2 * 768 + 1) * 2072
    pythia = {
        "model_type": "gpt_neox",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50304,
    }
    assert of(pythia).parameters == 162_322_944  # Pythia 160M's card


MIXTURE = {**LLAMA, "model_type": "qwen3_moe", "head_dim": 8, "num_experts_per_tok": 2}
MIXTURE |= {"num_experts": 4, "moe_intermediate_size": 20}


def test_moe_configs() -> None:
    attention = Q + KV + OUT + 2 * 48
    mixed = attention + 2 * 8 + 4 * 48 + 4 * 3 * 48 * 20
    dense = attention + 2 * 8 + 3 * 48 * 100
    assert of(MIXTURE).parameters == OUTSIDE + 3 * mixed
    some = of(MIXTURE, mlp_only_layers=[1])
    assert some.parameters == OUTSIDE + 2 * mixed + dense
    assert [layer.is_moe for layer in some.iter_layers()] == [True, False, True]
    assert [layer.is_moe for layer in of(MIXTURE, decoder_sparse_step=2).iter_layers()] == [False, True, False]
    assert (some.experts, some.top_k) == (4, 2)
    mixtral = of(MIXTURE, model_type="mixtral", num_local_experts=4)
    assert mixtral.parameters == OUTSIDE + 3 * (attention + 4 * 48 + 4 * 3 * 48 * 100)


def test_deepseek_without_a_narrow_query() -> None:
    lite = {**PUBLISHED["deepseek-v2"], "q_lora_rank": None, "hidden_size": 2048, "num_hidden_layers": 27}
    lite |= {"num_attention_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    found = of(lite, n_routed_experts=64)
    assert found.parameters == 15_706_484_224  # DeepSeek-V2-Lite's weights
    assert [count for _, count in found.layers] == [1, 26]


def test_a_config_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    complete = {**LLAMA, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(complete))
    assert resolve_shape(str(folder)) == resolve_shape(str(folder / "config.json")) == hf_shape(complete, "my-llama")
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert resolve_shape(str(tmp_path / "other.json")).name == "other"


def test_all_faults_of_a_config_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    bad = {**LLAMA, "num_hidden_layers": 0, "vocab_size": True, "tie_word_embeddings": "yes", "num_key_value_heads": 4}
    del bad["intermediate_size"]
    path.write_text(json.dumps(bad))
    found = {fault.key: fault for fault in faults(str(path))}
    keys = {"num_hidden_layers", "vocab_size", "tie_word_embeddings", "num_key_value_heads", "intermediate_size"}
    assert found.keys() == keys
    assert "missing" in found["intermediate_size"].message
    assert found["num_hidden_layers"].legal == "a whole number >= 1 and <= 2147483647"
    path.write_text(json.dumps({"model_type": "deepseek_v3"}))
    assert len(faults(str(path))) == 12


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert "cannot be read" in faults(str(path))[0].message
    for text in ("{", "[1]", "\x00"):
        path.write_text(text)
        assert faults(str(path))[0].key == "model"
    path.write_text(json.dumps({"model_type": "lama"}))
    assert 'did you mean "llama"?' in faults(str(path))[0].hint
    path.write_text("{}")
    (fault,) = faults(str(path))
    assert (fault.key, fault.legal) == ("model_type", ", ".join(HF_ARCHITECTURES))
    assert faults(str(path))[0].message == "is missing from the config"
