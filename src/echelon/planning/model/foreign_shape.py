"""The `ModelShape` of a causal language model of transformers: its own class, traced without values.

Tracing runs the operators that training runs, in the dtype of the plan: norms that cast to float32 save float32,
attention is what the model's configuration chooses, and the experts of a layer are one grouped GEMM for all tokens.
What an operator saves may grow with the sequence (scores, masks), so the trace has the sequences of the plan.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from echelon.layout.validation_error import ValidationError
from echelon.models.foreign.causal_lm import adapt, build_on_meta
from echelon.models.foreign.hf_source import HF_PREFIX, HFSource, quiet_transformers
from echelon.models.foreign.init_rules import materialize_buffers
from echelon.models.foreign.language_head import LogitMap
from echelon.models.foreign.usual_values import UsualValues
from echelon.models.forward_parts.shapes_only import copy_without_values
from echelon.planning.model.model_shape import ChunkedLoss, ModelShape, default_seq_len
from echelon.planning.model.trace_module import TRACED_SEQUENCES, describe_error, refuse_trace, trace_copy

if TYPE_CHECKING:
    from torch import nn


def is_transformers_model(model: Any) -> bool:
    """Whether it is an instance of a class of transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def hf_dir_shape(source: HFSource, *, seq_len: int = 0, precision: str = "bf16") -> ModelShape:
    """The shape of `hf:DIR` from its config.json, for sequences of `seq_len` tokens, by default the model's."""
    spec = f"{HF_PREFIX}{source.folder}"
    with quiet_transformers():
        try:
            model = build_on_meta(source)
            materialize_buffers(model)
        except ValidationError:
            raise
        except Exception as error:  # whatever transformers raises for a configuration
            rule = f"is refused by transformers ({describe_error(error)})"
            raise ValidationError.single("model", spec, rule, hint="correct its config.json") from error
        return replace(_shape(model, spec, seq_len, precision), name=source.name)


def hf_model_shape(model: nn.Module, *, seq_len: int = 0, precision: str = "bf16") -> ModelShape:
    """The shape of an instance of a class of transformers, which is not changed."""
    with quiet_transformers():
        return _shape(model, type(model).__name__, seq_len, precision)


def _shape(model: Any, name: str, seq_len: int, precision: str) -> ModelShape:
    longest = HFSource(folder=Path(), config=model.config.to_dict()).max_seq_len
    length = seq_len or default_seq_len(longest)
    shape = _trace(model, name, min(length, longest or length), precision)
    if length > shape.traced_seq_len and not shape.position_parameters:  # no table limits the length
        shape = _trace(model, name, length, precision)
    return replace(shape, max_seq_len=longest or shape.max_seq_len)


def _trace(model: nn.Module, name: str, seq_len: int, precision: str) -> ModelShape:
    tokens = torch.zeros(TRACED_SEQUENCES, seq_len, dtype=torch.int64, device="meta")
    copied = copy_without_values(model, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    try:
        adapt(copied.module)
    except ValueError as error:  # its layers are not known
        raise ValidationError.single("model", name, f"cannot be planned: {describe_error(error)}") from error
    try:
        with UsualValues(finds_indices=False):
            shape = trace_copy(copied, {"tokens": tokens, "targets": tokens}, name)
    except Exception as error:
        raise refuse_trace(name, error) from error
    logits: LogitMap = copied.module.logit_map  # type: ignore[assignment]
    return replace(shape, loss=ChunkedLoss(divides_vocab=logits.divides_vocab) if logits.divides_tokens else None)
