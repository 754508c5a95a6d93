"""Weights under Hugging Face's names: transformers itself computes the same logits with them, and gives them back."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from echelon.models import ModelConfig, build, find_model, reduced_config
from echelon.models.attention import rope_angles
from echelon.models.attention_config import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from echelon.models.hf.hf_config_reader import parse_hf_config
from echelon.models.hf.param_names import from_hugging_face, hf_model_type, param_mappings, to_hugging_face

SMALL = {
    name: replace(reduced_config(find_model(name)), layers=2)
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2")
}
LLAMA, GPT, DEEPSEEK = (replace(find_model(name), layers=2) for name in ("llama-tiny", "gpt-tiny", "deepseek-tiny"))
assert DEEPSEEK.mla is not None
MODELS: dict[str, ModelConfig] = {
    "gpt2": GPT,
    "gpt2 untied": replace(GPT, tied=False),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(SMALL["qwen3-30b-a3b"], moe=None),
    "mixtral": SMALL["mixtral-8x7b"],
    "qwen3_moe": SMALL["qwen3-30b-a3b"],
    "deepseek_v2": SMALL["deepseek-v2"],
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 direct queries": replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, query_rank=0)),
}


def ours(config: ModelConfig) -> nn.Module:
    model = build(config, seed=3)
    with torch.no_grad():
        for index, tensor in enumerate((*model.parameters(), *model.buffers())):
            # First values are small, and many are 0 or 1: larger ones make every path matter.
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))
            tensor.mul_(4).add_(0.1 * noise) if tensor.dim() > 1 else tensor.add_(0.3 * noise)
    return model.eval()


def theirs(config: ModelConfig) -> Any:
    """transformers' own model of a configuration."""
    transformers = pytest.importorskip("transformers")
    kind = hf_model_type(config)
    if kind == "gpt2":
        sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
        found = transformers.GPT2Config(
            vocab_size=config.vocab, n_positions=config.max_seq_len, tie_word_embeddings=config.tied, **sizes
        )
        return transformers.GPT2LMHeadModel(found).eval()
    values: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
        "tie_word_embeddings": config.tied,
    }
    if config.mla is None:
        values["head_dim"] = config.head_dim
    else:
        latent = config.mla
        values |= {"q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.kv_rank}
        values |= {"qk_rope_head_dim": latent.rope_dim, "qk_nope_head_dim": latent.nope_dim}
        values |= {"v_head_dim": latent.value_dim}
    if config.moe is not None:
        mixture, options = config.moe, dict(config.moe.options)
        values |= {"num_experts_per_tok": mixture.k}
        if kind == "mixtral":
            values |= {"num_local_experts": mixture.experts, "intermediate_size": mixture.ffn}
        elif kind == "qwen3_moe":
            values |= {"num_experts": mixture.experts, "norm_topk_prob": options["normalise"]}
        else:
            values |= {"n_routed_experts": mixture.experts, "first_k_dense_replace": mixture.dense_layers}
            values |= {"n_group": options["num_groups"], "topk_group": options["group_limit"]}
            values |= {"routed_scaling_factor": options["scale"], "n_shared_experts": mixture.shared_ffn // mixture.ffn}
            values |= {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
        values |= {"moe_intermediate_size": mixture.ffn} if kind != "mixtral" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values)).eval()


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    if config.moe is not None and config.moe.shared_ffn:
        # Theirs are a multiple of an expert's size.
        config = replace(config, moe=replace(config.moe, shared_ffn=2 * config.moe.ffn))
    model, other = ours(config), theirs(config)
    state = model.state_dict()
    given = to_hugging_face(state, config, stacked=True)
    left = other.load_state_dict(given, strict=False)
    assert left.missing_keys == (["lm_head.weight"] if config.tied else [])
    assert not left.unexpected_keys
    tokens = torch.randint(config.vocab, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = model.logits(tokens), other(tokens, use_cache=False).logits
    assert float(wanted.std()) > 0.1
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert equal(from_hugging_face(other.state_dict(), config), state)
    # What transformers writes is what we call published.
    other.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    assert equal(published, to_hugging_face(state, config))
    assert equal(from_hugging_face(published, config), state)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stacked", [False, True])
def test_round_trip(name: str, stacked: bool) -> None:
    """Also where transformers is not installed."""
    config = MODELS[name]
    state = ours(config).state_dict()
    assert equal(from_hugging_face(to_hugging_face(state, config, stacked=stacked), config), state)
    names = [name for pair in param_mappings(config, stacked=stacked) for name in pair.hf]
    assert len(names) == len({*names})


def test_every_published_size_has_names() -> None:
    for name, example in (
        ("mixtral-8x7b", "model.layers.31.block_sparse_moe.experts.7.w3.weight"),
        ("qwen3-30b-a3b", "model.layers.47.mlp.experts.127.up_proj.weight"),
        ("deepseek-v2", "model.layers.59.mlp.experts.159.down_proj.weight"),
        ("deepseek-v3", "model.layers.60.mlp.gate.e_score_correction_bias"),
        ("llama-405b", "model.layers.125.self_attn.q_proj.weight"),
        ("gpt2-1.5b", "transformer.h.47.attn.c_attn.weight"),
    ):
        config = find_model(name)
        found = list(param_mappings(config))
        assert example in {name for pair in found for name in pair.hf}
        built = build(config, "meta").state_dict()
        assert {name for pair in found for name in pair.native} == {*built} - (
            {"head.weight"} if config.tied else set()
        )


def test_what_older_and_larger_files_hold_beside() -> None:
    """GPT-2 was published without a prefix and with its masks, DeepSeek-V3 with a layer that is not built here."""
    state = ours(GPT).state_dict()
    old = {name.removeprefix("transformer."): x for name, x in to_hugging_face(state, GPT).items()}
    assert equal(from_hugging_face({**old, "h.0.attn.bias": torch.ones(1)}, GPT), state)
    state = ours(DEEPSEEK).state_dict()
    more = {**to_hugging_face(state, DEEPSEEK), "model.layers.2.eh_proj.weight": torch.ones(1)}
    assert equal(from_hugging_face(more, DEEPSEEK), state)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "deepseek_v3"])
def test_experts_in_every_other_layer_have_no_names_but_qwens(name: str) -> None:
    config, qwen = MODELS[name], MODELS["qwen3_moe"]
    assert config.moe is not None
    assert qwen.moe is not None
    with pytest.raises(ValueError, match="no model that computes"):
        hf_model_type(replace(config, moe=replace(config.moe, every=2)))
    assert hf_model_type(replace(qwen, moe=replace(qwen.moe, every=2))) == "qwen3_moe"


def test_wrong_weights_and_models_without_names_are_refused() -> None:
    state = to_hugging_face(ours(LLAMA).state_dict(), LLAMA)
    del state["model.norm.weight"]
    state["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"missing: model.norm.weight; unknown: model.layers.2.mlp.up_proj.weight"):
        from_hugging_face(state, LLAMA)
    for name in ("switch-tiny", "gshard-tiny", "qwen-moe-tiny", "conv-tiny"):
        with pytest.raises(ValueError, match=f"no model that computes {name}"):
            hf_model_type(find_model(name))


def test_stretched_angles_are_those_of_transformers() -> None:
    """Fast pairs as they were, slow ones slower, and those between in proportion: all three kinds are there."""
    stretch = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
    config = replace(LLAMA, rope_scaling=stretch, theta=1e4)
    place = torch.arange(256).unsqueeze(0)
    cosines, _ = rope_angles(place, 16, config.theta, torch.float64, stretch)
    plain, _ = rope_angles(place, 16, config.theta, torch.float64)
    slower, _ = rope_angles(
        place, 16, config.theta, torch.float64, replace(stretch, low_freq_factor=1e8, high_freq_factor=2e8)
    )
    same, slow = ((cosines == other).all(dim=1)[0] for other in (plain, slower))
    assert same.any()
    assert slow.any()
    assert (~same & ~slow).any()
    transformers = pytest.importorskip("transformers")
    how = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    how |= {"original_max_position_embeddings": 64}
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=how)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    wanted, _ = LlamaRotaryEmbedding(theirs)(torch.zeros(1), place)
    assert float((cosines - wanted[..., :8]).abs().max()) < 1e-4


PUBLISHED_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""the keys and values of the published config.json"""


def test_the_published_config_of_deepseek_v3() -> None:
    config = parse_hf_config(PUBLISHED_V3, "deepseek-v3").config
    named = find_model("deepseek-v3")
    assert config.parameters == named.parameters
    scaling = config.rope_scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert (scaling.rotation_scale, scaling.score_scale) == (1.0, pytest.approx((0.1 * math.log(40) + 1) ** 2))


@pytest.mark.parametrize(
    "rope",
    [
        PUBLISHED_V3["rope_scaling"],
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 7, "attention_factor": 0.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1 << 17},
        {"rope_type": "linear", "factor": 3.0},
    ],
    ids=str,
)
def test_scaled_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """The tables: every cosine and sine, of which transformers computes the frequencies in float32."""
    transformers = pytest.importorskip("transformers")
    place, given = torch.arange(0, 200, 7)[None], {**rope, "rope_type": rope.get("rope_type", "yarn")}
    given.pop("type", None)
    values = {**LLAMA_KEYS, "max_position_embeddings": 4096}
    config = parse_hf_config({"model_type": "llama", **values, "rope_scaling": given}, "scaled").config
    theirs = transformers.LlamaConfig(**values, rope_parameters={**given, "rope_theta": 1e4})
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    for ours, expected in zip(
        rope_angles(place, 64, config.theta, torch.float64, config.rope_scaling),
        module(torch.zeros(1), place),
        strict=True,
    ):
        assert torch.allclose(ours.float(), expected[..., :32], rtol=0.0, atol=3e-5)


LLAMA_KEYS = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_invalid_rope_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="low_freq_factor < high_freq_factor"):
        Llama3RopeScaling(factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_seq_len=64)
    with pytest.raises(ValueError, match="rope_scaling is an option of the llama family"):
        replace(
            GPT,
            rope_scaling=LinearRopeScaling(factor=8.0),
        )
