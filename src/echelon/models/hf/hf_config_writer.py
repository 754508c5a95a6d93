"""From a `ModelConfig` to the `config.json` with which transformers builds the same model. No torch."""

from __future__ import annotations

from typing import Any

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.hf.hf_architectures import EQUIVALENT_TYPES, MLA_EPSILON, TRAINABLE
from echelon.models.hf.hf_config_reader import LLAMA3_ROPE_KEYS
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import SavedModel
from echelon.models.moe_config import MoEConfig


def hf_config(model: SavedModel, dtype: str) -> dict[str, Any]:
    """Raises ValueError where transformers has no model that computes the same."""
    from echelon.models.hf.param_names import hf_model_type

    config, computed = model.config, hf_model_type(model.config)
    kind = model.model_type if EQUIVALENT_TYPES.get(model.model_type) == computed else computed
    if wrong := _unsupported(config, kind):
        raise ValidationError(wrong)
    head = {"architectures": [TRAINABLE[kind].class_name], "model_type": kind, "dtype": dtype}
    return {**head, **(_gpt2(config) if kind == "gpt2" else _rotary(config, kind))}


def _unsupported(config: ModelConfig, kind: str) -> list[ValidationIssue]:
    """What ours compute and theirs do not."""
    found = []

    def fault(key: str, value: object, rule: str, legal: str = "") -> None:
        found.append(ValidationIssue(key=key, value=str(value), message=f"{rule} ({kind})", legal=legal))

    if not config.causal:
        fault("causal", "false", "is not what transformers' models of text do", "true")
    if config.mla is not None and config.epsilon != MLA_EPSILON:
        fault("epsilon", config.epsilon, "is not that of transformers' latent attention", f"{MLA_EPSILON:g}")
    if config.mla is not None and config.moe is None:
        fault("mixture", "none", "is missing, and transformers' latent attention comes with experts")
    if config.moe is None:
        return found
    mixture, options = config.moe, dict(config.moe.options)
    for key, fine in (("capacity_factor", None), ("score", "sigmoid" if kind == "deepseek_v3" else "softmax")):
        if options.get(key, fine) != fine:
            fault(f"gate {key}", options[key], "is not what transformers' gate does", str(fine))
    if kind in ("mixtral", "deepseek_v2") and options.get("normalise", kind == "mixtral") != (kind == "mixtral"):
        fault("gate normalise", options["normalise"], "is not what transformers' gate does")
    if mixture.shared_ffn % mixture.ffn:
        fault("shared", mixture.shared_ffn, f"is not a multiple of an expert's size ({mixture.ffn})")
    if kind == "deepseek_v3":
        groups, limit = options.get("num_groups", 8), options.get("group_limit", 4)
        if int(limit) < int(groups) and mixture.k // int(limit) != 2:
            fault("gate group_limit", limit, "groups are chosen by other than their 2 best experts", "half of k")
    return found


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab,
        "n_positions": config.max_seq_len,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rotary(config: ModelConfig, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.epsilon,
        **_rope(config),
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind in ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        found["attention_bias"] = False
    if kind == "llama":
        found["mlp_bias"] = False
    if kind in ("mistral", "mixtral"):
        found["sliding_window"] = None
    if TRAINABLE[kind].sliding_window_flag:
        found["use_sliding_window"] = False
    if config.mla is not None:
        latent = config.mla
        found |= {"q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.kv_rank}
        found |= {"qk_rope_head_dim": latent.rope_dim, "qk_nope_head_dim": latent.nope_dim}
        found |= {"v_head_dim": latent.value_dim}
    elif kind != "qwen2":
        found["head_dim"] = config.head_dim
    return {**found, **(_moe(config, config.moe, kind) if config.moe is not None else {})}


def _rope(config: ModelConfig) -> dict[str, Any]:
    """As transformers 5 reads them, and as it did before."""
    stretch = config.rope_scaling
    if stretch is None:
        return {"rope_theta": config.theta, "rope_parameters": {"rope_type": "default", "rope_theta": config.theta}}
    said = dict(
        zip(
            LLAMA3_ROPE_KEYS,
            (stretch.factor, stretch.low_freq_factor, stretch.high_freq_factor, stretch.original_max_seq_len),
            strict=True,
        )
    )
    how = {"rope_type": "llama3", **said}
    return {
        "rope_theta": config.theta,
        "rope_scaling": how,
        "rope_parameters": {**how, "rope_theta": config.theta},
    }


def _moe(config: ModelConfig, mixture: MoEConfig, kind: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(mixture.options)
    found: dict[str, Any] = {"num_experts_per_tok": round(mixture.k)}
    if kind in ("mixtral", "qwen3_moe"):
        balance = float(options.get("balance", 0.02 if kind == "mixtral" else 0.001))
        found["router_aux_loss_coef"] = float(f"{balance * config.layers:.12g}")
        found["output_router_logits"] = False
    if kind == "mixtral":
        return {**found, "num_local_experts": mixture.experts, "intermediate_size": mixture.ffn}
    found["moe_intermediate_size"] = mixture.ffn
    if kind == "qwen3_moe":
        dense = [layer for layer in range(config.layers) if not mixture.is_moe_layer(layer)]
        found |= {"num_experts": mixture.experts, "norm_topk_prob": bool(options.get("normalise", False))}
        return {**found, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    third = kind == "deepseek_v3"
    found |= {"n_routed_experts": mixture.experts, "first_k_dense_replace": mixture.dense_layers}
    found |= {"n_group": options.get("num_groups", 8), "topk_group": options.get("group_limit", 4 if third else 3)}
    found |= {"routed_scaling_factor": float(options.get("scale", 1.0))}
    found |= {"n_shared_experts": mixture.shared_ffn // mixture.ffn, "moe_layer_freq": 1}
    if third:
        return {**found, "norm_topk_prob": bool(options.get("normalise", True)), "rope_interleave": True}
    return {**found, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
