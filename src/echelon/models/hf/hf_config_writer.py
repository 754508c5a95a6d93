"""From a `ModelConfig` to the `config.json` with which transformers builds the same model. No torch."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.attention_config import HF_ROPE_KEYS
from echelon.models.hf.hf_architectures import EQUIVALENT_TYPES, MLA_EPSILON, TRAINABLE
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import SavedModel
from echelon.models.moe_config import MoEConfig


def hf_config(model: SavedModel, dtype: str) -> dict[str, Any]:
    """The keys of a config.json. Raises ValueError if transformers has no model that computes the same."""
    from echelon.models.hf.param_names import hf_model_type

    config, computed = model.config, hf_model_type(model.config)
    model_type = model.model_type if EQUIVALENT_TYPES.get(model.model_type) == computed else computed
    if issues := _unsupported(config, model_type):
        raise ValidationError(issues)
    head = {"architectures": [TRAINABLE[model_type].class_name], "model_type": model_type, "dtype": dtype}
    return {**head, **(_gpt2(config) if model_type == "gpt2" else _rotary(config, model_type))}


def _unsupported(config: ModelConfig, model_type: str) -> list[ValidationIssue]:
    """Issues of what our model computes and transformers' does not."""
    result = []

    def add_issue(key: str, value: object, rule: str, legal: str = "") -> None:
        result.append(ValidationIssue(key=key, value=str(value), message=f"{rule} ({model_type})", legal=legal))

    if not config.causal:
        add_issue("causal", "false", "is not what transformers' models of text do", "true")
    if config.mla is not None and config.epsilon != MLA_EPSILON:
        add_issue("epsilon", config.epsilon, "is not that of transformers' latent attention", f"{MLA_EPSILON:g}")
    if config.mla is not None and config.moe is None:
        add_issue("mixture", "none", "is missing: transformers' latent attention requires MoE layers")
    if config.moe is None:
        return result
    moe, options = config.moe, dict(config.moe.options)
    for key, fine in (("capacity_factor", None), ("score", "sigmoid" if model_type == "deepseek_v3" else "softmax")):
        if options.get(key, fine) != fine:
            add_issue(f"gate {key}", options[key], "is not what transformers' gate does", str(fine))
    normalises = model_type == "mixtral"
    if model_type in ("mixtral", "deepseek_v2") and options.get("normalise", normalises) != normalises:
        add_issue("gate normalise", options["normalise"], "is not what transformers' gate does")
    if moe.shared_ffn % moe.ffn:
        add_issue("shared", moe.shared_ffn, f"is not a multiple of an expert's size ({moe.ffn})")
    if model_type == "deepseek_v3":
        groups, limit = options.get("num_groups", 8), options.get("group_limit", 4)
        if int(limit) < int(groups) and moe.k // int(limit) != 2:
            add_issue("gate group_limit", limit, "groups are chosen by other than their 2 best experts", "half of k")
    return result


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


def _rotary(config: ModelConfig, model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = {
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
    if model_type in ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"):
        result["attention_bias"] = False
    if model_type == "llama":
        result["mlp_bias"] = False
    if model_type in ("mistral", "mixtral"):
        result["sliding_window"] = None
    if TRAINABLE[model_type].sliding_window_flag:
        result["use_sliding_window"] = False
    if config.mla is not None:
        mla = config.mla
        result |= {"q_lora_rank": mla.query_rank or None, "kv_lora_rank": mla.kv_rank}
        result |= {"qk_rope_head_dim": mla.rope_dim, "qk_nope_head_dim": mla.nope_dim, "v_head_dim": mla.value_dim}
    elif model_type != "qwen2":
        result["head_dim"] = config.head_dim
    return {**result, **(_moe(config, config.moe, model_type) if config.moe is not None else {})}


def _rope(config: ModelConfig) -> dict[str, Any]:
    """RoPE keys for transformers 5 and for older versions."""
    theta = {"rope_theta": config.theta}
    if config.rope_scaling is None:
        return {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling.kind}
    for field in fields(config.rope_scaling):  # type: ignore[arg-type]  # every variant is a dataclass
        value = getattr(config.rope_scaling, field.name)
        if field.default is MISSING or value != field.default:
            scaling[HF_ROPE_KEYS.get(field.name, field.name)] = value
    return {**theta, "rope_scaling": scaling, "rope_parameters": {**scaling, **theta}}


def _moe(config: ModelConfig, moe: MoEConfig, model_type: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(moe.options)
    result: dict[str, Any] = {"num_experts_per_tok": round(moe.k)}
    if model_type in ("mixtral", "qwen3_moe"):
        balance = float(options.get("balance", 0.02 if model_type == "mixtral" else 0.001))
        result["router_aux_loss_coef"] = float(f"{balance * max(config.num_moe_layers, 1):.12g}")
        result["output_router_logits"] = False
    if model_type == "mixtral":
        return {**result, "num_local_experts": moe.experts, "intermediate_size": moe.ffn}
    result["moe_intermediate_size"] = moe.ffn
    if model_type == "qwen3_moe":
        dense = [layer for layer in range(config.layers) if not moe.is_moe_layer(layer)]
        result |= {"num_experts": moe.experts, "norm_topk_prob": bool(options.get("normalise", False))}
        return {**result, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    is_v3 = model_type == "deepseek_v3"
    result |= {"n_routed_experts": moe.experts, "first_k_dense_replace": moe.dense_layers}
    result |= {"n_group": options.get("num_groups", 8), "topk_group": options.get("group_limit", 4 if is_v3 else 3)}
    result |= {"routed_scaling_factor": float(options.get("scale", 1.0))}
    result |= {"n_shared_experts": moe.shared_ffn // moe.ffn, "moe_layer_freq": 1}
    if is_v3:
        return {**result, "norm_topk_prob": bool(options.get("normalise", True)), "rope_interleave": True}
    return {**result, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
