"""The `ModelShape` of a named size, a Hugging Face `config.json`, a model of transformers, or a traced module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.layout.validation_error import ValidationError, did_you_mean
from echelon.models import user_model
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.hf.hf_config_reader import read_hf_config, read_hf_spec
from echelon.models.model_config import SIZES, ModelConfig, find_model
from echelon.models.model_dir import is_model_dir
from echelon.planning.model import layer_families
from echelon.planning.model.layer_families import LayerFamily
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.transformer_shape import transformer_shape

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_names() -> list[str]:
    return [name for name, config in SIZES.items() if config.family != "conv"]


def resolve_shape(
    model: str | nn.Module,
    *,
    seq_len: int = 0,
    precision: str = "bf16",
    inputs: Mapping[str, Tensor] | None = None,
) -> ModelShape:
    """The shape of a model given as text, or of a module. Raises ValidationError with all issues.

    A model of transformers is traced for sequences of `seq_len` tokens in a precision; any other module with `inputs`
    of its forward.
    """
    if not isinstance(model, str):
        return _module_shape(model, seq_len, precision, inputs)
    model = model.strip()
    if is_hf_model(model):
        source = read_hf_source(model)
        from echelon.planning.model import foreign_shape  # imports torch

        return foreign_shape.hf_dir_shape(source, seq_len=seq_len, precision=precision)
    if model in SIZES:
        return config_shape(SIZES[model])
    if is_model_dir(model):
        return config_shape(find_model(model))
    if model.endswith(".json") or os.path.isfile(os.path.join(model, "config.json")):
        return replace(transformer_shape(read_hf_spec(Path(model))), trainable=_is_trainable(Path(model)))
    if ":" in model:
        return _traced_shape(model)
    legal = f"{', '.join(model_names())}, a Hugging Face config.json, hf:DIR, or module.py:factory"
    hint = did_you_mean(model, model_names())
    raise ValidationError.single("model", model, "is an unknown model size", legal=legal, hint=hint)


def _module_shape(module: nn.Module, seq_len: int, precision: str, inputs: Mapping[str, Tensor] | None) -> ModelShape:
    from echelon.planning.model import foreign_shape, trace_module  # import torch

    if inputs is None and foreign_shape.is_transformers_model(module):
        return foreign_shape.hf_model_shape(module, seq_len=seq_len, precision=precision)
    return trace_module.trace_module(module, inputs)


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
