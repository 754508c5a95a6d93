"""From a Hugging Face `config.json` to a `ModelShape`, for the families whose parameters we count exactly.

What transformers builds from the same file has as many parameters. Some files also name layers that predict several
tokens, which transformers does not build, and windows of attention; attention is counted whole here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.planning.model.model_shape import Latent, ModelShape
from echelon.planning.model.transformer_shape import transformer_shape


class ConfigValues:
    """Takes numbers out of a config and keeps what is missing or wrong."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.faults: list[ValidationIssue] = []

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A number of the config. Without a default it must be there; a fault gives 1, so that reading goes on."""
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.faults.append(ValidationIssue(key=key, value="", message="is missing from the config", hint="add it"))
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fault(key, "is not a number that it can be", f"a whole number >= {least}")
            return 1
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            self.fault(key, "is neither true nor false", "true, false")
        return bool(value)

    def fault(self, key: str, rule: str, legal: str = "", hint: str = "") -> None:
        value = json.dumps(self.given.get(key))[:80]
        self.faults.append(ValidationIssue(key=key, value=value, message=rule, legal=legal, hint=hint))


@dataclass(frozen=True, kw_only=True)
class PlanOnlyFamily:
    """In what a family differs from Llama."""

    tied: bool = False
    """whether the head uses the embedding's matrix where the config does not say"""
    qkv_bias: bool = False
    """queries, keys and values have biases, always"""
    norms: int = 2
    """of the width, in a layer"""
    head_norms: bool = False
    """queries and keys of each head pass a norm"""
    head_dim: bool = False
    """must be given; it does not follow from the width"""
    experts: str = ""
    """the key that says how many"""
    expert_ffn: str = ""
    """the key of the size of one"""


LLAMA_LIKE = {
    "llama": PlanOnlyFamily(),
    "mistral": PlanOnlyFamily(),
    "phi3": PlanOnlyFamily(),
    "qwen2": PlanOnlyFamily(qkv_bias=True),
    "qwen3": PlanOnlyFamily(head_norms=True),
    "gemma": PlanOnlyFamily(tied=True, head_dim=True),
    "gemma2": PlanOnlyFamily(tied=True, head_dim=True, norms=4),
    "gemma3_text": PlanOnlyFamily(tied=True, head_dim=True, norms=4, head_norms=True),
    "mixtral": PlanOnlyFamily(experts="num_local_experts", expert_ffn="intermediate_size"),
    "qwen3_moe": PlanOnlyFamily(head_norms=True, experts="num_experts", expert_ffn="moe_intermediate_size"),
}


def read_hf_shape(path: str) -> ModelShape:
    """The shape of a config.json, or of the folder that holds one."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        problem = "" if isinstance(given, dict) else "does not hold a JSON object"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
    if problem:
        raise ValidationError(
            [ValidationIssue(key="model", value=path, message=problem, legal="a Hugging Face config.json")]
        )
    return hf_shape(given, file.parent.name if file.name == "config.json" else file.stem)


def hf_shape(given: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the keys of a config.json describe. Raises FaultError with all that is missing or wrong."""
    family = given.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        hint = did_you_mean(str(family), FAMILIES) or "trace the module itself: module.py:factory"
        rule = "is missing from the config" if family is None else "is not a family that planning reads"
        value = "" if family is None else str(family)
        raise ValidationError(
            [ValidationIssue(key="model_type", value=value, message=rule, legal=", ".join(FAMILIES), hint=hint)]
        )
    values = ConfigValues(given)
    found = FAMILIES[family](values, name)
    if values.faults:
        raise ValidationError(values.faults)
    return found


def _gpt2(values: ConfigValues, name: str) -> ModelShape:
    width, heads = values.integer("n_embd"), values.integer("n_head")
    _divides(values, "n_head", heads, "n_embd", width)
    rates = [values.given.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return transformer_shape(
        name,
        layers=values.integer("n_layer"),
        width=width,
        heads=heads,
        ffn=values.integer("n_inner", 4 * width),
        gated_mlp=False,
        vocab=values.integer("vocab_size"),
        biases=True,
        dropout=any(rates),
        tied=values.boolean("tie_word_embeddings", True),
        max_seq_len=values.integer("n_positions"),
        learned_positions=True,
    )


def _neox(values: ConfigValues, name: str) -> ModelShape:
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    _divides(values, "num_attention_heads", heads, "hidden_size", width)
    found = transformer_shape(
        name,
        layers=values.integer("num_hidden_layers"),
        width=width,
        heads=heads,
        ffn=values.integer("intermediate_size"),
        gated_mlp=False,
        vocab=values.integer("vocab_size"),
        biases=True,
        tied=values.boolean("tie_word_embeddings", False),
        max_seq_len=values.integer("max_position_embeddings", 0),
    )
    fewer = 0 if values.boolean("attention_bias", True) else -(3 * width + width)
    return _add_parameters(found, fewer)


def _llama(values: ConfigValues, name: str) -> ModelShape:
    habits = LLAMA_LIKE[values.given["model_type"]]
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    kv_heads, layers = values.integer("num_key_value_heads", heads), values.integer("num_hidden_layers")
    head_dim = values.integer("head_dim", None if habits.head_dim else max(width // heads, 1))
    if values.given.get("head_dim") is None:
        _divides(values, "num_attention_heads", heads, "hidden_size", width)
    _divides(values, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    ffn = values.integer("intermediate_size")
    # transformers 5 writes Qwen's experts under Mixtral's key.
    counted = habits.experts if habits.experts in values.given else "num_local_experts"
    experts = values.integer(counted if counted in values.given else habits.experts) if habits.experts else 0
    found = transformer_shape(
        name,
        layers=2 if experts else layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated_mlp=True,
        vocab=values.integer("vocab_size"),
        tied=values.boolean("tie_word_embeddings", habits.tied),
        max_seq_len=values.integer("max_position_embeddings", 0),
        experts=experts,
        top_k=values.integer("num_experts_per_tok") if experts else 0,
        expert_ffn=values.integer(habits.expert_ffn) if experts else 0,
        dense_layers=1 if experts else 0,
    )
    qkv = (heads + 2 * kv_heads) * head_dim
    more = (habits.norms - 2) * width + (2 * head_dim if habits.head_norms else 0)
    more += qkv if habits.qkv_bias else 0
    more += qkv + width if values.boolean("attention_bias", False) else 0
    more += 2 * ffn + width if not experts and values.boolean("mlp_bias", False) else 0
    found = _add_parameters(found, more)
    return _arrange_layers(found, _moe_layers(values, layers)) if experts else found


def _deepseek(values: ConfigValues, name: str) -> ModelShape:
    layers, ffn = values.integer("num_hidden_layers"), values.integer("moe_intermediate_size")
    latent = Latent(
        query_rank=values.integer("q_lora_rank", 0),
        kv_rank=values.integer("kv_lora_rank"),
        rope_dim=values.integer("qk_rope_head_dim"),
        nope_dim=values.integer("qk_nope_head_dim"),
        value_dim=values.integer("v_head_dim"),
    )
    found = transformer_shape(
        name,
        layers=2,
        width=values.integer("hidden_size"),
        heads=values.integer("num_attention_heads"),
        ffn=values.integer("intermediate_size"),
        gated_mlp=True,
        vocab=values.integer("vocab_size"),
        tied=values.boolean("tie_word_embeddings", False),
        max_seq_len=values.integer("max_position_embeddings", 0),
        experts=values.integer("n_routed_experts"),
        top_k=values.integer("num_experts_per_tok"),
        expert_ffn=ffn,
        shared_ffn=values.integer("n_shared_experts", 0, least=0) * ffn,
        dense_layers=1,
        latent=latent,
    )
    first, every = values.integer("first_k_dense_replace", 0, least=0), values.integer("moe_layer_freq", 1)
    found = _add_parameters(found, latent.query_rank + latent.kv_rank)  # the norms of the narrow vectors
    return _arrange_layers(found, [index >= first and index % every == 0 for index in range(layers)])


FAMILIES: dict[str, Callable[[ConfigValues, str], ModelShape]] = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    **dict.fromkeys(LLAMA_LIKE, _llama),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""by model_type"""


def _divides(values: ConfigValues, key: str, number: int, other: str, whole: int) -> None:
    if whole % number:
        rule = f"does not divide {other} ({whole})"
        values.fault(key, rule, hint="change one of them" if other != "hidden_size" else "change one, or give head_dim")


def _moe_layers(values: ConfigValues, layers: int) -> list[bool]:
    """Which layers have experts, as Qwen's configs say it."""
    every, dense = values.integer("decoder_sparse_step", 1), values.given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        values.fault("mlp_only_layers", "is not a list of layers")
        dense = []
    return [index not in dense and (index + 1) % every == 0 for index in range(layers)]


def _arrange_layers(found: ModelShape, sparse: Sequence[bool]) -> ModelShape:
    """The first layer's kind and the second's, in this order."""
    (plain, _), (mixture, _) = found.layers
    runs = [(mixture if mixed else plain, len(list(run))) for mixed, run in groupby(sparse)]
    return replace(found, layers=tuple(runs))


def _add_parameters(found: ModelShape, more: int) -> ModelShape:
    """With more parameters in every layer, which multiply nothing."""
    layers = ((replace(layer, other_parameters=layer.other_parameters + more), count) for layer, count in found.layers)
    return replace(found, layers=tuple(layers))
