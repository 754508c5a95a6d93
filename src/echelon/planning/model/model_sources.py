"""The `ModelShape` of a named size, a Hugging Face `config.json`, or a traced module."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from echelon.layout.validation_error import ValidationError, did_you_mean
from echelon.models import user_model
from echelon.models.foreign.hf_source import HF_PREFIX, is_hf_model
from echelon.models.hf.hf_config_reader import read_hf_config, read_hf_spec
from echelon.models.model_config import SIZES, ModelConfig, find_model
from echelon.models.model_dir import is_model_dir
from echelon.planning.model import layer_families
from echelon.planning.model.layer_families import LayerFamily
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.transformer_shape import transformer_shape


def model_names() -> list[str]:
    return [name for name, config in SIZES.items() if config.family != "conv"]


def resolve_shape(model: str) -> ModelShape:
    """The shape of a model given as text. Raises ValidationError with all issues."""
    model = model.strip()
    if model in SIZES:
        return config_shape(SIZES[model])
    if is_model_dir(model):
        return config_shape(find_model(model))
    if model.endswith(".json") or os.path.isfile(os.path.join(model, "config.json")):
        return replace(transformer_shape(read_hf_spec(Path(model))), trainable=_is_trainable(Path(model)))
    if is_hf_model(model):
        rule, folder = "cannot be priced as transformers' own class", model.removeprefix(HF_PREFIX)
        hint = f"plan {folder}/config.json, where ours computes the same"
        raise ValidationError.single("model", model, rule, hint=hint)
    if ":" in model:
        return _traced_shape(model)
    legal = f"{', '.join(model_names())}, a Hugging Face config.json, or module.py:factory"
    hint = did_you_mean(model, model_names())
    raise ValidationError.single("model", model, "is an unknown model size", legal=legal, hint=hint)


def _is_trainable(hf_config: Path) -> bool:
    """Whether our models compute what a Hugging Face config describes."""
    try:
        return bool(read_hf_config(hf_config))
    except ValidationError:
        return False


def config_shape(config: ModelConfig) -> ModelShape:
    """The shape of a model that we build."""
    if config.family == "conv":
        rule = "is a convolutional network; planning requires a transformer"
        raise ValidationError.single("model", config.name, rule, legal=", ".join(model_names()))
    return transformer_shape(config.spec, _layer_family(config))


def _layer_family(config: ModelConfig) -> LayerFamily:
    if config.mla is not None:
        return layer_families.LLAMA_MLA
    if config.qk_norm:
        return layer_families.LLAMA_QK_NORM
    return layer_families.GPT if config.family == "gpt" else layer_families.LLAMA


def _traced_shape(spec: str) -> ModelShape:
    batches = spec.rpartition(":")[0] + ":batch"
    legal = "a function batch(rows, step) in the file of the model"
    issues = list(user_model.validate_spec(spec))
    issues = issues or [replace(issue, legal=legal) for issue in user_model.validate_spec(batches)]
    if issues:
        raise ValidationError(issues)
    from echelon.planning.model.trace_module import trace_module  # imports torch

    return trace_module(spec)
