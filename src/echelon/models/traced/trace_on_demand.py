"""Whether a layout needs the graph of a model, because the model declares neither splits nor stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from echelon.layout import Layout
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.tp_splits import find_tp_split
from echelon.models.traced.graph_model import make_traceable


def needs_graph(model: nn.Module, layout: Layout) -> bool:
    """Whether a layout divides a model in a way that the model does not declare."""
    if isinstance(model, ForeignCausalLM):
        return False
    return (layout.pp > 1 and not hasattr(model, "pipeline_model")) or (
        layout.tp > 1 and layout.tp_kind == "1d" and not declares_roles(model)
    )


def declares_roles(model: nn.Module) -> bool:
    """Whether the model has a table of roles; one of states only overrides what is derived."""
    return any(not is_state(role) for role in find_tp_split(model).values())


def is_state(role: str) -> bool:
    """Whether an entry of an attribute `split` is the state of a tensor (S0, R), and no role of a module."""
    return role[:1] in "RBPS" and role[:1].isupper()


def trace_if_needed(
    model: nn.Module, layout: Layout, inputs: Mapping[str, Any] | None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Let a model run from its graph if the layout needs it, and there are inputs to trace it with.

    `dtype` is that of parameters and activations in forward.
    """
    if inputs is None or not needs_graph(model, layout):
        return model
    for key in ("cp", "ep"):
        if (degree := getattr(layout, key)) > 1:
            raise ValueError(
                f"{key}={degree} is incompatible with a model that runs from its traced graph ({type(model).__name__} "
                f"declares no {'stages' if declares_roles(model) else 'split'}); use {key}=1, or declare both"
            )
    traced = make_traceable(model, inputs)
    if dtype is not None:
        traced.retype(dtype)
    traced.runs_graph = True
    result: nn.Module = traced
    return result
