"""Where a `ModelShape` comes from: a named size, a Hugging Face `config.json`, or a module that is traced."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial

from echelon.layout.validation_error import Fault, FaultError, did_you_mean
from echelon.models import user_model
from echelon.models.model_config import SIZES, ModelConfig, find
from echelon.models.model_dir import is_saved
from echelon.planning.cost import fused_layers
from echelon.planning.model import hf_shape
from echelon.planning.model.model_shape import Latent, ModelShape
from echelon.planning.model.transformer_shape import transformer


def names() -> list[str]:
    """Every size that has a name."""
    return [name for name, config in SIZES.items() if config.family != "conv"]


def shape_of(text: str) -> ModelShape:
    """The shape that a text means. Raises FaultError with all that is wrong with it."""
    text = text.strip()
    if text in SIZES:
        return of_config(SIZES[text])
    if is_saved(text):
        return of_config(find(text))
    if text.endswith(".json") or os.path.isfile(os.path.join(text, "config.json")):
        return hf_shape.read(text)
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
    gpt, latent, mixture = config.family == "gpt", config.latent, config.mixture
    norms = latent.query_rank + latent.kv_rank if latent else 2 * config.head_dim if config.head_norms else 0
    found = partial(
        transformer,
        config.name,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        gated=not gpt,
        vocab=config.vocab,
        biases=gpt,
        dropout=config.dropout > 0,
        tied=config.tied,
        max_seq_len=config.max_seq_len,
        learned_positions=gpt,
        causal=config.causal,
        latent=Latent(**asdict(latent)) if latent else None,
        more_parameters=norms + (config.heads + 2 * config.kv_heads) * config.head_dim * config.qkv_bias,
        parts=_parts(config),
    )
    if mixture is None:
        return found()
    return found(
        experts=mixture.experts,
        top_k=round(mixture.k),
        expert_ffn=mixture.ffn,
        expert_gated=mixture.activation == "swiglu",
        shared_ffn=mixture.shared,
        dense_layers=mixture.dense,
        every=mixture.every,
    )


def _parts(config: ModelConfig) -> fused_layers.Parts:
    if config.latent is not None:
        return fused_layers.LATENT
    if config.head_norms:
        return fused_layers.NORMED
    return fused_layers.GPT if config.family == "gpt" else fused_layers.LLAMA


def _traced(text: str) -> ModelShape:
    batches = text.rpartition(":")[0] + ":batch"
    legal = "a function batch(rows, step) in the file of the model"
    faults = list(user_model.faults(text)) or [replace(fault, legal=legal) for fault in user_model.faults(batches)]
    if faults:
        raise FaultError(faults)
    from echelon.planning.model.trace_module import trace  # torch takes seconds

    return trace(text)
