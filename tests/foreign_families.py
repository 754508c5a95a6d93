"""Small configurations of 27 families of causal language models of transformers, with what makes them differ.

Four layers, so that two stages have two and layer types alternate; four heads with two for keys where a family allows
that; a vocabulary that no tp divides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

VOCAB = 97
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_LLAMA = {**_TOKENS, **_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_LLAMA |= {"max_position_embeddings": 64, "pad_token_id": None}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
_WINDOW = {"head_dim": 8, "sliding_window": 7}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_TOP_2 = {"num_experts_per_tok": 2}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **_TOP_2}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "mistral": ("mistral", {**_LLAMA, **_WINDOW}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 8}),
    "gemma2": ("gemma2", {**_LLAMA, **_WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_LLAMA, **_WINDOW, **_ALTERNATING, "query_pre_attn_scalar": 8}),
    "phi": ("phi", {**_LLAMA, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", _LLAMA),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "opt": ("opt", {**_TOKENS, **_SIZES, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {**_TOKENS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "falcon": ("falcon", {**_TOKENS, **_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo2": ("olmo2", _LLAMA),
    "starcoder2": ("starcoder2", _LLAMA),
    "stablelm": ("stablelm", _LLAMA),
    "cohere": ("cohere", _LLAMA),
    "granite": ("granite", {**_LLAMA, **_GRANITE, "attention_multiplier": 0.2}),
    "glm4": ("glm4", {**_LLAMA, "head_dim": 8}),
    "smollm3": ("smollm3", _LLAMA),
    "mixtral": ("mixtral", {**_LLAMA, **_TOP_2, "num_local_experts": 4, "head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA, **_TOP_2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LLAMA, **_LATENT, **_GROUPED, "num_key_value_heads": 4, "moe_intermediate_size": 16},
    ),
    "gpt_oss": ("gpt_oss", {**_LLAMA, **_WINDOW, **_ALTERNATING, **_TOP_2, "num_local_experts": 4}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_LLAMA,
            **_LINEAR,
            **_TOP_2,
            "head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "mamba2": (
        "mamba2",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 8, "state_size": 8}
        | {"n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
}
MOE_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


def build_family(name: str, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """The class of transformers with random weights, as a user has it."""
    transformers = pytest.importorskip("transformers")
    kind, values = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **{**values, **(changes or {})})
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def write_family(name: str, folder: Path, **changes: Any) -> Path:
    """Write the config.json of a family, as a directory from Hugging Face has it."""
    transformers = pytest.importorskip("transformers")
    kind, values = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    transformers.AutoConfig.for_model(kind, **{**values, **changes}).save_pretrained(folder)
    return folder
