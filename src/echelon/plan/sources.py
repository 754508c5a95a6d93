"""Where a `ModelShape` comes from: a named size, a Hugging Face `config.json`, or a module that is traced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from echelon.layout.faults import Fault, FaultError, did_you_mean
from echelon.models import own
from echelon.models.sizes import SIZES, ModelConfig
from echelon.plan import hugging_face, kernels
from echelon.plan.shape import ModelShape, transformer

_DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
PLANNED: Mapping[str, Mapping[str, Any]] = {
    "moe-tiny": {
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 257,
        "max_position_embeddings": 256,
    },
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
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
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
        **_DEEPSEEK,
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
"""Sizes that can be planned before echelon.models builds them, as their published configs have them."""


def names() -> list[str]:
    """Every size that has a name."""
    ours = [name for name, config in SIZES.items() if config.family != "conv"]
    return [*ours, *(name for name in PLANNED if name not in SIZES)]


def shape_of(text: str) -> ModelShape:
    """The shape that a text means. Raises FaultError with all that is wrong with it."""
    text = text.strip()
    if text in SIZES:
        return of_config(SIZES[text])
    if text in PLANNED:
        return hugging_face.shape(PLANNED[text], text)
    if text.endswith(".json") or os.path.isfile(os.path.join(text, "config.json")):
        return hugging_face.read(text)
    if ":" in text:
        return _traced(text)
    legal = f"{', '.join(names())}, a Hugging Face config.json, or module.py:factory"
    rule = "is not the name of a model size"
    raise FaultError([Fault(key="model", value=text, rule=rule, legal=legal, hint=did_you_mean(text, names()))])


def of_config(config: ModelConfig) -> ModelShape:
    """The shape of one of our models."""
    if config.family == "conv":
        rule = "is a convolutional network, and planning knows layers that pass tokens"
        raise FaultError([Fault(key="model", value=config.name, rule=rule, legal=", ".join(names()))])
    gpt = config.family == "gpt"
    return transformer(
        config.name,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.ffn,
        gated=not gpt,
        vocab=config.vocab,
        biases=gpt,
        dropout=config.dropout > 0,
        tied=config.tied,
        max_seq_len=config.max_seq_len,
        learned_positions=gpt,
        kernels=kernels.gpt if gpt else kernels.llama,
    )


def _traced(text: str) -> ModelShape:
    batches = text.rpartition(":")[0] + ":batch"
    legal = "a function batch(rows, step) in the file of the model"
    faults = list(own.faults(text)) or [replace(fault, legal=legal) for fault in own.faults(batches)]
    if faults:
        raise FaultError(faults)
    from echelon.plan.trace import trace  # torch takes seconds

    return trace(text)
