"""Small random models of transformers' own, of every kind that is imported. Nothing is downloaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

_ROPE = {"rope_type": "default", "rope_theta": 5e4}
_ROTARY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _ROPE,
}
_STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "rope_theta": 100.0,
}
"""some pairs of each head before, some inside and some behind the ramp"""
_LATENT = {
    **_ROTARY,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt2 untied": (
        "gpt2",
        {
            "vocab_size": 97,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 40,
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "llama": ("llama", _ROTARY),
    "llama tied": ("llama", {**_ROTARY, "tie_word_embeddings": True, "head_dim": 12}),
    "llama 3.1": (
        "llama",
        {
            **_ROTARY,
            "hidden_size": 64,
            "rope_parameters": {
                **_STRETCHED,
                "rope_theta": 1e4,
            },
        },
    ),
    "llama linear": ("llama", {**_ROTARY, "rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama yarn": ("llama", {**_ROTARY, "hidden_size": 64, "max_position_embeddings": 256, "rope_parameters": _YARN}),
    "mistral": ("mistral", {**_ROTARY, "sliding_window": None}),
    "mistral short": ("mistral", {**_ROTARY, "sliding_window": 64}),
    "qwen2": ("qwen2", _ROTARY),
    "qwen3": ("qwen3", {**_ROTARY, "head_dim": 12, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_ROTARY,
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {
            **_LATENT,
            "max_position_embeddings": 256,
            "rope_parameters": {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
        },
    ),
}


def build(name: str) -> Any:
    """With larger weights than the first ones, so that every path matters."""
    transformers = pytest.importorskip("transformers")
    kind, values = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **values)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for index, (key, tensor) in enumerate(sorted(model.state_dict().items())):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))
            if "inv_freq" not in key:
                tensor.mul_(4).add_(0.1 * noise) if tensor.dim() > 1 else tensor.add_(0.3 * noise)
        model.tie_weights()
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """transformers' own model of a directory, and what it says of names."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: tuple[Any, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    return found[0].eval(), found[1]


def tokens() -> Tensor:
    return torch.randint(97, (2, 21), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens(), use_cache=False).logits
    return found
