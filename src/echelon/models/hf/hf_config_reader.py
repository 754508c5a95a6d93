"""From a Hugging Face `config.json` to a `ModelConfig`, or why our models do not compute it. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.hf.hf_architectures import HF_ARCHITECTURES, HFArchitecture
from echelon.models.mla_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import SavedModel
from echelon.models.moe_config import MoEConfig
from echelon.models.rope_scaling import RopeScaling
from echelon.planning.model.hf_shape import ConfigValues

CONFIG_FILE = "config.json"
MAX_LAYERS = 10_000
"""names are made for each"""
LLAMA3_ROPE_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""how Llama 3.1's stretched angles are described"""


def read_hf_config(folder: Path) -> SavedModel:
    """What the `config.json` of a directory describes."""
    file = folder / CONFIG_FILE
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        problem = "" if isinstance(given, dict) else "it does not hold a JSON object"
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise ValueError(f"the model's config cannot be read ({file}: {problem}); give the directory of a whole model")
    return parse_hf_config(given, folder.resolve().name)


def parse_hf_config(given: Mapping[str, Any], name: str) -> SavedModel:
    """Raises FaultError with all that is missing, wrong, or not computed by our models."""
    family = given.get("model_type")
    if not isinstance(family, str) or family not in HF_ARCHITECTURES:
        rule = "is missing from the config" if family is None else "is not a kind of model that is computed here"
        hint = did_you_mean(str(family), HF_ARCHITECTURES)
        value = "" if family is None else str(family)
        raise ValidationError(
            [ValidationIssue(key="model_type", value=value, message=rule, legal=", ".join(HF_ARCHITECTURES), hint=hint)]
        )
    kind, values = HF_ARCHITECTURES[family], NumericConfigValues(given)
    _check_supported(values, kind)
    read_family: Callable[[NumericConfigValues, HFArchitecture, str], dict[str, Any]] = _READ.get(family, _rotary)
    sizes = read_family(values, kind, family)
    if values.faults:
        raise ValidationError(values.faults)
    return SavedModel(config=ModelConfig(name=name, **sizes), model_type=family)


class NumericConfigValues(ConfigValues):
    """With numbers that need not be whole."""

    def number(self, key: str, default: float, *, least: float = 0.0) -> float:
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            self.fault(key, "is not a number that it can be", f">= {least:g}")
            return default
        return float(value)


def _check_supported(values: NumericConfigValues, kind: HFArchitecture) -> None:
    """What our models do not compute."""
    for key, fine in kind.supported_values.items():
        if values.given.get(key, fine[0]) not in fine:
            legal = ", ".join(json.dumps(value) for value in fine)
            values.fault(key, "is not computed by our models", legal)
    classes = values.given.get("architectures")
    if classes and not (isinstance(classes, list) and kind.architecture in classes):
        values.fault("architectures", "is another model than one that predicts tokens", kind.architecture)
    window = values.given.get("sliding_window", kind.sliding_window)
    used = not kind.sliding_window_flag or values.boolean(kind.sliding_window_flag, False)
    longest = values.given.get("max_position_embeddings")
    numbers = isinstance(window, int) and isinstance(longest, int)
    if used and window is not None and not (numbers and window >= longest):
        values.faults.append(
            ValidationIssue(
                key="sliding_window",
                value=str(window),
                message=f"is a window of attention, which our models do not have (max_position_embeddings={longest})",
                hint=f"set max_position_embeddings to {window}, up to which the window changes nothing",
            )
        )


def _gpt2(values: NumericConfigValues, kind: HFArchitecture, family: str) -> dict[str, Any]:
    width, heads = values.integer("n_embd"), values.integer("n_head")
    _divides(values, "n_head", heads, "n_embd", width)
    rates = {key: values.number(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len({*rates.values()}) > 1:
        values.fault("resid_pdrop", f"is not the rate of all dropout ({rates}), of which ours have one", "equal rates")
    return {
        "family": "gpt",
        "layers": _num_layers(values, "n_layer"),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "ffn": values.integer("n_inner", 4 * width),
        "vocab": values.integer("vocab_size"),
        "max_seq_len": values.integer("n_positions"),
        "tied": values.boolean("tie_word_embeddings", True),
        "dropout": rates["resid_pdrop"],
        "epsilon": values.number("layer_norm_epsilon", kind.epsilon),
    }


def _rotary(values: NumericConfigValues, kind: HFArchitecture, family: str) -> dict[str, Any]:
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    kv_heads = values.integer("num_key_value_heads", heads)
    _divides(values, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    plain = {"qwen3": 128, "qwen3_moe": 0}.get(family, 0) or width // heads
    head_dim = values.integer("head_dim", plain)
    if head_dim == width // heads:
        _divides(values, "num_attention_heads", heads, "hidden_size", width)
    if head_dim % 2:
        values.fault("head_dim", "is odd, and rotary positions turn pairs", "an even number")
    found: dict[str, Any] = {
        "own_head_dim": 0 if head_dim * heads == width else head_dim,
        "head_norms": family in ("qwen3", "qwen3_moe"),
        "qkv_bias": family == "qwen2",
        "kv_heads": kv_heads,
        **_stem(values, kind),
    }
    if family == "qwen2" and found["own_head_dim"]:
        values.fault("head_dim", "is not the width divided by the heads, as this kind has it", str(width // heads))
    if family in ("mixtral", "qwen3_moe"):
        found["mixture"] = _moe_config(values, family, found["layers"], found["ffn"])
    return found


def _stem(values: NumericConfigValues, kind: HFArchitecture) -> dict[str, Any]:
    """What all with rotary positions have."""
    return {
        "family": "llama",
        "layers": _num_layers(values, "num_hidden_layers"),
        "width": values.integer("hidden_size"),
        "heads": values.integer("num_attention_heads"),
        "ffn": values.integer("intermediate_size"),
        "vocab": values.integer("vocab_size"),
        "max_seq_len": values.integer("max_position_embeddings"),
        "tied": values.boolean("tie_word_embeddings", False),
        **_rope(values, kind),
        "epsilon": values.number("rms_norm_eps", kind.epsilon),
    }


def _rope(values: NumericConfigValues, kind: HFArchitecture) -> dict[str, Any]:
    """Older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    given: dict[str, Any] = {"rope_theta": values.given.get("rope_theta", kind.rope_theta)}
    for key in ("rope_scaling", "rope_parameters"):
        found = values.given.get(key) or {}
        if not isinstance(found, dict):
            values.fault(key, "is not an object")
            continue
        given |= found
        word = found.get("rope_type", found.get("type", "default"))
        if word not in ("default", "llama3"):
            rule = f"stretches the angles of positions as our models do not ({word})"
            values.fault(key, rule, "default, llama3", "models trained without it can be imported")
        if found.get("partial_rotary_factor", 1.0) != 1.0:
            values.fault(key, "turns a part of each head, and ours turn all of it", "partial_rotary_factor=1.0")
    old, new = (values.given.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if isinstance(old, dict) and isinstance(new, dict) and any(old[key] != new[key] for key in old.keys() & new.keys()):
        values.fault("rope_scaling", f"contradicts rope_parameters ({json.dumps(new)})", hint="leave out one of them")
    inner = NumericConfigValues(given)
    theta = inner.number("rope_theta", kind.rope_theta, least=1.0)
    values.faults += inner.faults
    if given.get("rope_type", given.get("type")) != "llama3":
        return {"theta": theta}
    low, high, first = (given.get(key) for key in LLAMA3_ROPE_KEYS[1:])
    try:
        stretch = RopeScaling(factor=float(given["factor"]), low=float(low), high=float(high), first=int(first))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        stretch = None
        values.fault("rope_parameters", "does not say how angles are stretched (llama3)", ", ".join(LLAMA3_ROPE_KEYS))
    return {"theta": theta, "stretch": stretch}


def _moe_config(values: NumericConfigValues, family: str, layers: int, ffn: int) -> MoEConfig:
    # transformers 5 writes Qwen's under Mixtral's key.
    count = "num_experts" if "num_experts" in values.given else "num_local_experts"
    coefficient = values.number("router_aux_loss_coef", 0.001) / layers
    experts, k = values.integer(count), values.integer("num_experts_per_tok")
    if family == "mixtral":
        return MoEConfig(experts=experts, k=k, ffn=ffn, gate="mixtral", options=(("balance", coefficient),))
    options = (("normalise", values.boolean("norm_topk_prob", False)), ("balance", coefficient))
    step, dense = values.integer("decoder_sparse_step", 1), values.given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        values.fault("mlp_only_layers", "is not a list of layers")
        dense = []
    wanted = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    size = values.integer("moe_intermediate_size")
    found = MoEConfig(experts=experts, k=k, ffn=size, gate="qwen", options=options)
    for every, first in product(range(1, layers + 1), range(layers)):
        placed = replace(found, dense=first, every=every)
        if [placed.is_moe_layer(layer) for layer in range(layers)] == wanted:
            return placed
    rule = f"puts experts into layers as ours cannot (decoder_sparse_step={step})"
    values.fault("mlp_only_layers", rule, "the first layers, or none")
    return found


def _deepseek(values: NumericConfigValues, kind: HFArchitecture, family: str) -> dict[str, Any]:
    stem, ffn = _stem(values, kind), values.integer("moe_intermediate_size")
    k, groups = values.integer("num_experts_per_tok"), values.integer("n_group", 1)
    limit, shared = values.integer("topk_group", 1), values.integer("n_shared_experts", 0, least=0)
    if family == "deepseek_v2" and values.given.get("topk_method", "greedy") == "greedy":
        groups = limit = 1
    if family == "deepseek_v3" and limit < groups and k // limit != 2:
        rule = f"chooses groups by their 2 best experts, and ours by {k // limit} (num_experts_per_tok={k})"
        values.fault("topk_group", rule, "half of num_experts_per_tok")
    if not shared:
        values.fault("n_shared_experts", "is 0, and transformers' model has shared experts", "1 or more")
    options: list[tuple[str, Any]] = [
        ("num_groups", groups),
        ("group_limit", limit),
        ("scale", values.number("routed_scaling_factor", 1.0)),
    ]
    if family == "deepseek_v3":
        options.append(("normalise", values.boolean("norm_topk_prob", True)))
    rank = values.integer("q_lora_rank", 0)
    dims = [values.integer(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
    experts = values.integer("n_routed_experts")
    if values.faults:
        return {}
    latent = MLAConfig(query_rank=rank, kv_rank=dims[0], rope_dim=dims[1], nope_dim=dims[2], value_dim=dims[3])
    mixture = MoEConfig(
        experts=experts,
        k=k,
        ffn=ffn,
        gate=family.replace("_", "-"),
        options=tuple(options),
        shared=shared * ffn,
        dense=values.integer("first_k_dense_replace", 0, least=0),
    )
    return {**stem, "kv_heads": stem["heads"], "latent": latent, "mixture": mixture}


_READ = {"gpt2": _gpt2, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek}


def _num_layers(values: NumericConfigValues, key: str) -> int:
    found = values.integer(key)
    if found <= MAX_LAYERS:
        return found
    values.fault(key, "is more than any model has", f"1 to {MAX_LAYERS}")
    return 1


def _divides(values: NumericConfigValues, key: str, number: int, other: str, whole: int) -> None:
    if whole % number:
        values.fault(key, f"does not divide {other} ({whole})", hint="change one of them")
