"""Reads a Hugging Face `config.json` into a `ModelSpec`, or into the `ModelConfig` that trains it. No torch.

    config.json --parse_hf_spec-->  ModelSpec     every architecture of hf_architectures.py; what planning reads
                --parse_hf_config-> SavedModel    those that our models compute, or every reason why they do not

The spec has as many parameters as the model that transformers builds. Layers that predict further tokens, which
transformers does not build, and windows of attention are not in it: attention counts in full.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from echelon.input_file import InputFileError, read_json
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.attention_config import HF_ROPE_KEYS, ROPE_SCALINGS, MLAConfig, RopeScaling
from echelon.models.hf.hf_architectures import HF_ARCHITECTURES, TRAINABLE, TrainingSupport
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import SavedModel
from echelon.models.model_spec import ModelSpec, MoESpec
from echelon.models.moe_config import MoEConfig

CONFIG_FILE = "config.json"
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""of a dimension, and of a number of layers, heads or tokens"""
DROPOUT_KEYS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
QUANTIZATION_KEY = "quantization_config"
FP8_QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3"}
"""what a `quantization_config` must say, as DeepSeek-V3's does: fp8 with a scale for each block of a weight"""


class ConfigValues:
    """Takes values out of a config and collects what is missing or invalid, one issue for each key."""

    def __init__(self, given: Mapping[str, Any], model_type: str) -> None:
        self.given, self.model_type, self.known = given, model_type, HF_ARCHITECTURES[model_type]
        self.by_key: dict[str, ValidationIssue] = {}

    @property
    def support(self) -> TrainingSupport:
        return TRAINABLE[self.model_type]

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of the config, or the default; without a default it is required. An issue gives 1."""
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.add_missing(key)
        elif isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            self.add(key, "is not a valid number", f"a whole number >= {least} and <= {MAX_SIZE}")
        else:
            return value
        return 1

    def number(self, key: str, default: float, *, least: float = 0.0) -> float:
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            self.add(key, "is not a valid number", f"a finite number >= {least:g}")
            return default
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            self.add(key, "is neither true nor false", "true, false")
        return bool(value)

    def add(self, key: str, message: str, legal: str = "", hint: str = "") -> None:
        value = json.dumps(self.given.get(key))[:80]
        self.by_key.setdefault(key, ValidationIssue(key=key, value=value, message=message, legal=legal, hint=hint))

    def add_missing(self, key: str) -> None:
        issue = ValidationIssue(key=key, value="", message="is missing from the config", hint="add it")
        self.by_key.setdefault(key, issue)

    def raise_issues(self) -> None:
        if self.by_key:
            raise ValidationError(list(self.by_key.values()))


def read_hf_spec(path: Path) -> ModelSpec:
    """The spec of a config.json, or of the directory that holds one."""
    return parse_hf_spec(*_load(path))


def read_hf_config(path: Path) -> SavedModel:
    """The trainable model of a config.json, or of the directory that holds one."""
    return parse_hf_config(*_load(path))


def read_weight_blocks(path: Path) -> tuple[int, int] | None:
    """Rows and columns of the blocks of quantised weights that share a scale; None: the weights are not quantised."""
    given, _ = _load(path)
    return weight_blocks(given.get(QUANTIZATION_KEY))


def weight_blocks(quantization: Any) -> tuple[int, int] | None:
    """The blocks of a `quantization_config`. Raises ValueError if it is not one that import dequantises."""
    if quantization is None:
        return None
    given = quantization if isinstance(quantization, dict) else {}
    blocks = given.get("weight_block_size")
    is_fp8 = all(given.get(key, value) == value for key, value in FP8_QUANTIZATION.items()) and "quant_method" in given
    if is_fp8 and isinstance(blocks, list) and len(blocks) == 2 and all(type(n) is int and n > 0 for n in blocks):
        return blocks[0], blocks[1]
    raise ValueError("is not a quantisation that import reads")


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    """The keys of a config.json, and the model's name."""
    file = path if path.suffix == ".json" else path / CONFIG_FILE
    try:
        given = read_json(file)
        problem = "" if isinstance(given, dict) else "does not hold a JSON object"
    except InputFileError as error:
        problem = error.reason
    if problem:
        issue = ValidationIssue(key="model", value=str(path), message=problem, legal=f"a Hugging Face {CONFIG_FILE}")
        raise ValidationError([issue])
    return given, file.resolve().parent.name if file.name == CONFIG_FILE else file.stem


def parse_hf_spec(given: Mapping[str, Any], name: str) -> ModelSpec:
    """The spec that the keys of a config.json describe. Raises ValidationError with everything missing or invalid."""
    hint = "trace the module itself: module.py:factory"
    model_type = _model_type(given, HF_ARCHITECTURES, "is not an architecture that planning reads", hint)
    values = ConfigValues(given, model_type)
    spec = _SPEC_READERS[values.known.keys](values, name)
    values.raise_issues()
    return spec


def parse_hf_config(given: Mapping[str, Any], name: str) -> SavedModel:
    """The model that trains it. Raises ValidationError with everything missing, invalid or unsupported."""
    model_type = _model_type(given, TRAINABLE, "is not an architecture that our models compute", "")
    values = ConfigValues(given, model_type)
    _check_supported(values)
    spec = _SPEC_READERS[values.known.keys](values, name)
    features = _TRAINING_FEATURES[values.known.keys](values, spec)
    values.raise_issues()
    config = ModelConfig(
        name=name,
        layers=spec.layers,
        width=spec.width,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        ffn=spec.ffn,
        vocab=spec.vocab,
        max_seq_len=spec.max_seq_len,
        tied=spec.tied,
        **features,
    )
    return SavedModel(config=config, model_type=model_type)


def _model_type(given: Mapping[str, Any], known: Mapping[str, object], message: str, hint: str) -> str:
    model_type = given.get("model_type")
    if isinstance(model_type, str) and model_type in known:
        return model_type
    message = "is missing from the config" if model_type is None else message
    value, hint = "" if model_type is None else str(model_type), did_you_mean(str(model_type), known) or hint
    issue = ValidationIssue(key="model_type", value=value, message=message, legal=", ".join(known), hint=hint)
    raise ValidationError([issue])


# -- the spec ---------------------------------------------------------------------------------------------------------


def _gpt2(values: ConfigValues, name: str) -> ModelSpec:
    spec = _sizes(values, name, width="n_embd", heads="n_head", layers="n_layer")
    _check_divides(values, "n_head", spec.heads, "n_embd", spec.width)
    return replace(
        spec,
        ffn=values.integer("n_inner", 4 * spec.width),
        gated_mlp=False,
        biases=True,
        dropout=any(values.given.get(key, 0.1) for key in DROPOUT_KEYS),
        max_seq_len=values.integer("n_positions"),
        learned_positions=True,
    )


def _gpt_neox(values: ConfigValues, name: str) -> ModelSpec:
    spec = _common(values, name)
    _check_divides(values, "num_attention_heads", spec.heads, "hidden_size", spec.width)
    fewer = 0 if values.boolean("attention_bias", True) else 4 * spec.width
    return replace(spec, gated_mlp=False, biases=True, extra_parameters=-fewer)


def _llama(values: ConfigValues, name: str) -> ModelSpec:
    spec, known = _common(values, name), values.known
    width, heads, kv_heads = spec.width, spec.heads, values.integer("num_key_value_heads", spec.heads)
    default = None if known.requires_head_dim else known.head_dim or spec.head_dim
    head_dim = values.integer("head_dim", default)
    if values.given.get("head_dim") is None:
        _check_divides(values, "num_attention_heads", heads, "hidden_size", width)
    _check_divides(values, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    moe = _sparse_moe(values, spec.layers) if known.experts_key else None
    qkv = (heads + 2 * kv_heads) * head_dim
    extra = (known.norms - 2) * width + (2 * head_dim if known.qk_norm else 0) + (qkv if known.qkv_bias else 0)
    extra += qkv + width if values.boolean("attention_bias", False) else 0
    extra += 2 * spec.ffn + width if moe is None and values.boolean("mlp_bias", False) else 0
    return replace(spec, kv_heads=kv_heads, head_dim=head_dim, moe=moe, extra_parameters=extra)


def _deepseek(values: ConfigValues, name: str) -> ModelSpec:
    spec, ffn = _common(values, name), values.integer(values.known.expert_ffn_key)
    mla = _mla(values)
    first, every = values.integer("first_k_dense_replace", 0, least=0), values.integer("moe_layer_freq", 1)
    moe = MoESpec(
        experts=values.integer(values.known.experts_key),
        top_k=values.integer("num_experts_per_tok"),
        ffn=ffn,
        gated=True,
        shared_ffn=values.integer("n_shared_experts", 0, least=0) * ffn,
        layers=tuple(layer >= first and layer % every == 0 for layer in range(spec.layers)),
    )
    if mla is None:
        return replace(spec, moe=moe)
    norms = mla.query_rank + mla.kv_rank
    return replace(spec, head_dim=mla.head_dim, mla=mla, moe=moe, extra_parameters=norms)


def _common(values: ConfigValues, name: str) -> ModelSpec:
    """What all but GPT-2 name alike."""
    spec = _sizes(values, name, width="hidden_size", heads="num_attention_heads", layers="num_hidden_layers")
    ffn, longest = values.integer("intermediate_size"), values.integer("max_position_embeddings", 0)
    return replace(spec, ffn=ffn, max_seq_len=longest)


def _sizes(values: ConfigValues, name: str, *, width: str, heads: str, layers: str) -> ModelSpec:
    """The sizes under these keys, as of a model with a gated MLP and no biases."""
    hidden, num_heads = values.integer(width), values.integer(heads)
    return ModelSpec(
        name=name,
        layers=_num_layers(values, layers),
        width=hidden,
        heads=num_heads,
        kv_heads=num_heads,
        head_dim=max(hidden // num_heads, 1),
        ffn=1,
        gated_mlp=True,
        vocab=values.integer("vocab_size"),
        tied=values.boolean("tie_word_embeddings", values.known.tied),
    )


def _sparse_moe(values: ConfigValues, layers: int) -> MoESpec:
    """As Mixtral's and Qwen's configs describe it; transformers 5 writes Qwen's experts under Mixtral's key."""
    key = values.known.experts_key
    key = "num_local_experts" if key not in values.given and "num_local_experts" in values.given else key
    every, dense = values.integer("decoder_sparse_step", 1), values.given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        values.add("mlp_only_layers", "is not a list of layers")
        dense = []
    return MoESpec(
        experts=values.integer(key),
        top_k=values.integer("num_experts_per_tok"),
        ffn=values.integer(values.known.expert_ffn_key),
        gated=True,
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
    )


def _mla(values: ConfigValues) -> MLAConfig | None:
    sizes = {
        "query_rank": values.integer("q_lora_rank", 0),
        "kv_rank": values.integer("kv_lora_rank"),
        "rope_dim": values.integer("qk_rope_head_dim"),
        "nope_dim": values.integer("qk_nope_head_dim"),
        "value_dim": values.integer("v_head_dim"),
    }
    try:
        return None if values.by_key else MLAConfig(**sizes)
    except ValueError as error:
        values.add("qk_rope_head_dim", f"is invalid ({error})")
        return None


def _num_layers(values: ConfigValues, key: str) -> int:
    layers = values.integer(key)
    if layers <= MAX_LAYERS:
        return layers
    values.add(key, "is more than any model has", f"1 to {MAX_LAYERS}")
    return 1


def _check_divides(values: ConfigValues, key: str, number: int, other: str, total: int) -> None:
    if total % number:
        hint = "change one of them" if other != "hidden_size" else "change one, or give head_dim"
        values.add(key, f"does not divide {other} ({total})", hint=hint)


_SPEC_READERS = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama, "deepseek": _deepseek}


# -- what training needs in addition to the spec ----------------------------------------------------------------------


def _check_supported(values: ConfigValues) -> None:
    """Add an issue for everything that our models do not compute."""
    support = values.support
    for key, supported in support.supported_values.items():
        if values.given.get(key, supported[0]) not in supported:
            legal = ", ".join(json.dumps(value) for value in supported)
            values.add(key, "is not computed by our models", legal)
    try:
        weight_blocks(values.given.get(QUANTIZATION_KEY))
    except ValueError as error:
        legal = json.dumps({**FP8_QUANTIZATION, "weight_block_size": [128, 128]})
        values.add(QUANTIZATION_KEY, str(error), legal, "save the model unquantised")
    classes = values.given.get("architectures")
    if classes and not (isinstance(classes, list) and support.class_name in classes):
        values.add("architectures", "is another model than one that predicts tokens", support.class_name)
    window = values.given.get("sliding_window", support.sliding_window)
    enabled = not support.sliding_window_flag or values.boolean(support.sliding_window_flag, False)
    longest = values.given.get("max_position_embeddings")
    integers = isinstance(window, int) and isinstance(longest, int)
    if enabled and window is not None and not (integers and window >= longest):
        values.by_key["sliding_window"] = ValidationIssue(
            key="sliding_window",
            value=str(window),
            message=f"is a window of attention, which our models do not have (max_position_embeddings={longest})",
            hint=f"set max_position_embeddings to {window}, up to which the window changes nothing",
        )


def _gpt2_training(values: ConfigValues, spec: ModelSpec) -> dict[str, Any]:
    rates = {key: values.number(key, 0.1) for key in DROPOUT_KEYS}
    if len({*rates.values()}) > 1:
        values.add("resid_pdrop", f"is not the rate of all dropout ({rates}), of which ours have one", "equal rates")
    epsilon = values.number("layer_norm_epsilon", values.support.epsilon)
    return {"family": "gpt", "dropout": rates["resid_pdrop"], "epsilon": epsilon}


def _llama_training(values: ConfigValues, spec: ModelSpec) -> dict[str, Any]:
    known, explicit = values.known, 0 if spec.head_dim * spec.heads == spec.width else spec.head_dim
    if spec.head_dim % 2:
        values.add("head_dim", "is odd, and rotary embeddings rotate pairs", "an even number")
    if known.qkv_bias and explicit:
        values.add("head_dim", "is not the width divided by the heads", str(spec.width // spec.heads))
    return {
        **_rotary_training(values),
        "explicit_head_dim": explicit,
        "qk_norm": known.qk_norm,
        "qkv_bias": known.qkv_bias,
        "moe": _moe_config(values, spec, spec.moe) if spec.moe is not None else None,
    }


def _rotary_training(values: ConfigValues) -> dict[str, Any]:
    if values.given.get("max_position_embeddings") is None:
        values.add_missing("max_position_embeddings")
    epsilon = values.number("rms_norm_eps", values.support.epsilon)
    return {"family": "llama", **_rope(values), "epsilon": epsilon}


def _rope(values: ConfigValues) -> dict[str, Any]:
    """Older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    default = values.support.rope_theta
    given: dict[str, Any] = {"rope_theta": values.given.get("rope_theta", default)}
    tables: dict[str, dict[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = values.given.get(key) or {}
        if not isinstance(table, dict):
            values.add(key, "is not an object")
            continue
        if "type" in table:
            table = {"rope_type": table["type"], **table}
        given |= table
        tables[key] = table
        rope_type = table.get("rope_type", "default")
        if rope_type != "default" and not (isinstance(rope_type, str) and rope_type in ROPE_SCALINGS):
            message = f"scales rotary embeddings in a way that our models do not ({rope_type})"
            values.add(
                key, message, ", ".join(("default", *ROPE_SCALINGS)), "models trained without it can be imported"
            )
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            values.add(key, "rotates a part of each head, and ours rotate all of it", "partial_rotary_factor=1.0")
    old, new = (tables.get(key, {}) for key in ("rope_scaling", "rope_parameters"))
    if any(old[key] != new[key] for key in old.keys() & new.keys()):
        values.add("rope_scaling", f"contradicts rope_parameters ({json.dumps(new)})", hint="leave out one of them")
    inner = ConfigValues(given, values.model_type)
    theta = inner.number("rope_theta", default, least=1.0)
    values.by_key |= inner.by_key
    scaled_by = next((key for key in tables if tables[key].get("rope_type", "default") != "default"), "")
    if scaled_by and theta == 1.0:
        values.add("rope_theta", "gives all pairs one frequency, which cannot be scaled", "> 1")
    if not scaled_by or values.by_key.keys() & {scaled_by, "rope_theta"}:
        return {"theta": theta}
    return {"theta": theta, "rope_scaling": _rope_scaling(values, scaled_by, given)}


def _rope_scaling(values: ConfigValues, key: str, given: Mapping[str, Any]) -> RopeScaling | None:
    variant = ROPE_SCALINGS[given["rope_type"]]
    given = {"original_max_position_embeddings": values.given.get("max_position_embeddings"), **given}
    names = {field.name: HF_ROPE_KEYS.get(field.name, field.name) for field in fields(variant)}  # type: ignore[arg-type]
    try:
        read = {field: given[name] for field, name in names.items() if given.get(name) is not None}
        wrong = [names[field] for field, value in read.items() if isinstance(value, bool) != (field == "truncate")]
        if wrong or not all(isinstance(value, int | float) for value in read.values()):
            raise ValueError("a value is not a number")
        return variant(**read)
    except (TypeError, ValueError, OverflowError) as error:
        values.add(key, f"does not describe {variant.kind} scaling ({error})", ", ".join(names.values()))
        return None


def _moe_config(values: ConfigValues, spec: ModelSpec, moe: MoESpec) -> MoEConfig:
    # transformers takes the mean over MoE layers, dense ones left out.
    balance = ("balance", values.number("router_aux_loss_coef", 0.001) / max(sum(moe.layers), 1))
    config = MoEConfig(experts=moe.experts, k=moe.top_k, ffn=moe.ffn, gate="mixtral", options=(balance,))
    if values.model_type == "mixtral":
        return config
    options = (("normalise", values.boolean("norm_topk_prob", False)), balance)
    config = replace(config, gate="qwen", options=options)
    first = moe.layers.index(True) if any(moe.layers) else spec.layers
    for every in range(1, first + 2):
        placed = replace(config, dense_layers=first + 1 - every, every=every)
        if all(placed.is_moe_layer(layer) == wanted for layer, wanted in enumerate(moe.layers)):
            return placed
    step = values.given.get("decoder_sparse_step", 1)
    message = f"places experts in layers as ours cannot (decoder_sparse_step={step})"
    values.add("mlp_only_layers", message, "the first layers, or none")
    return config


def _deepseek_training(values: ConfigValues, spec: ModelSpec) -> dict[str, Any]:
    features, model_type, moe = _rotary_training(values), values.model_type, spec.moe
    assert moe is not None
    groups, limit = values.integer("n_group", 1), values.integer("topk_group", 1)
    if model_type == "deepseek_v2" and values.given.get("topk_method", "greedy") == "greedy":
        groups = limit = 1
    if model_type == "deepseek_v3" and limit < groups and moe.top_k // limit != 2:
        message = f"chooses groups by their 2 best experts, and ours by {moe.top_k // limit}"
        values.add("topk_group", f"{message} (num_experts_per_tok={moe.top_k})", "half of num_experts_per_tok")
    if not moe.shared_ffn:
        values.add("n_shared_experts", "is 0, and transformers' model has shared experts", "1 or more")
    scale = values.number("routed_scaling_factor", 1.0)
    options: list[tuple[str, Any]] = [("num_groups", groups), ("group_limit", limit), ("scale", scale)]
    if model_type == "deepseek_v3":
        options.append(("normalise", values.boolean("norm_topk_prob", True)))
    config = MoEConfig(
        experts=moe.experts,
        k=moe.top_k,
        ffn=moe.ffn,
        gate=model_type.replace("_", "-"),
        options=tuple(options),
        shared_ffn=moe.shared_ffn,
        dense_layers=values.integer("first_k_dense_replace", 0, least=0),
    )
    return {**features, "mla": spec.mla, "moe": config}


_TRAINING_FEATURES = {"gpt2": _gpt2_training, "llama": _llama_training, "deepseek": _deepseek_training}
