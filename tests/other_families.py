"""Small configurations of the causal language models of transformers beside those of foreign_families.py.

Each is its class's default with smaller sizes, which the name of a key tells, and what `CHANGES` says: layers of
different kinds in turn, and sizes that depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from foreign_families import FAMILIES, VOCAB

_SIZES: dict[int, str] = {
    48: "intermediate_size ffn_dim d_ff dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
    "expert_ffn_hidden_size intermediate_size_mlp prefix_dense_intermediate_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim lru_width",
    64: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length mamba_d_ssm",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size router_hidden_size",
    12: "q_lora_rank",
    8: "head_dim dim_head d_head kv_channels linear_head_dim index_head_dim swa_head_dim linear_key_head_dim "
    "linear_value_head_dim attention_head_dim kv_lora_rank v_head_dim mamba_d_state mamba_n_heads mamba_d_head "
    "mamba_chunk_size state_size chunk_size mamba_headdim hc_lowrank",
    7: "sliding_window sliding_window_size window_size attention_chunk_size attention_window_size swa_window_size",
    6: "index_topk",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads linear_num_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
    "index_n_heads linear_num_value_heads num_query_groups num_experts num_local_experts n_routed_experts "
    "moe_num_experts qk_rope_head_dim qk_nope_head_dim mamba_dt_rank time_step_rank rotary_dim",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_k top_k_experts n_group num_expert_group n_mamba_heads mamba_n_groups",
    1: "topk_group first_k_dense_replace num_dense_layers num_shared_experts n_shared_experts moe_num_shared_experts",
}
SIZE_OF_KEY = {key: size for size, keys in _SIZES.items() for key in keys.split()}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {"num_key_value_heads": 4, "head_dim": 4}
_ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_LLAMA4 = {
    "no_rope_layers": [1, 0] * 2,
    "layer_types": ["chunked_attention", "full_attention"] * 2,
    "interleave_moe_layer_step": 2,
}

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mimo_v2_flash", "beam", "flint", "kolibri1", "cwm", "cohere2", "cohere2_moe"), _WINDOWS),
    **dict.fromkeys(("exaone4", "exaone_moe", "olmo3", "granite_swa", "granitemoe_swa", "mellum"), _WINDOWS),
    **dict.fromkeys(("vaultgemma", "modernbert-decoder", "gemma4_unified_text"), _WINDOWS),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "minimax", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "afmoe": {"global_attn_every_n_layers": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {**_WINDOWS, "rope_parameters": _ROPES},
    "dbrx": {
        "n_heads": 4,
        "n_layers": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 4,
        "num_key_value_heads": 1,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        **_WINDOWS,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
    },
    "gemma4_text": {**_WINDOWS, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_LINEAR, "position_embedding_type": "rope"},
    "hrm_text": {"H_cycles": 1, "L_cycles": 1, "num_layers_per_stack": 2},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hy_v4": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {**_WINDOWS, "num_attention_heads_per_layer": [4] * 4, "rope_parameters": _ROPES},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"zero_expert_num": 2},
    "mpt": {"expansion_ratio": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "prophetnet": {"ngram": 2},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 48},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xlstm": {"chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "adapter_rank": 4,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
_TEXT_OF = {"qwen4_exp": "qwen4_exp_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
_TEXT_OF |= {"llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
CHANGES |= {kind: {"text_config": CHANGES[text]} for kind, text in _TEXT_OF.items()}

NOT_TRIED = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, whose keys it reads"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "generates sounds from a text that it is given beside them"),
    "blt": "cuts bytes into patches by the entropy of another model",
    "gemma3n": "requires timm for its images; its text model is gemma3n_text",
    "reformer": "takes sequences of a multiple of its chunks",
    "xlnet": "swaps sequences and tokens, and predicts in both directions",
}


def other_families() -> list[str]:
    """The model types of transformers' causal language models that are not in foreign_families.py."""
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    listed = {kind for kind, _ in FAMILIES.values()}
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in listed and kind not in NOT_TRIED]


def write_other_family(kind: str, folder: Path, **changes: Any) -> Path:
    """Write the config.json of a family, as a directory from Hugging Face has it."""
    transformers = pytest.importorskip("transformers")
    default = transformers.AutoConfig.for_model(kind).to_dict()
    values = _reduced(default, kind) | {"is_decoder": True}
    for key, value in CHANGES.get(kind, {}).items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
    folder.mkdir(parents=True, exist_ok=True)
    transformers.AutoConfig.for_model(kind, **{**values, **changes}).save_pretrained(folder)
    return folder


def _reduced(default: Mapping[str, Any], kind: str = "") -> dict[str, Any]:
    """Smaller values of the sizes of a configuration, and of those inside it."""
    reduced: dict[str, Any] = {}
    for key, value in default.items():
        if isinstance(value, dict) and key.endswith("_config") and value:
            names = {"model_type": value["model_type"]} if "model_type" in value else {}
            reduced[key] = _reduced(value) | names
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if "vocab_size" in key and "type" not in key:
            reduced[key] = VOCAB
        elif key in SIZE_OF_KEY:
            reduced[key] = SIZE_OF_KEY[key]
    if "kv_lora_rank" in reduced:
        reduced |= {key: size for key, size in _LATENT.items() if key in reduced and kind != "hy_v4"}
    if any("vocab_size" in key for key in reduced):
        pad = default.get("pad_token_id")
        is_possible = isinstance(pad, int) and 0 <= pad < VOCAB
        reduced |= {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": pad if is_possible else None if pad is None else 0,
        }
    return reduced
