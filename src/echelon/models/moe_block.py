"""Builds the dense and MoE blocks of a model from its configuration."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.moe_layer import MoELayer


def build_blocks(
    config: ModelConfig,
    dense_block: Callable[[ModelConfig], nn.Module],
    moe_block: Callable[[ModelConfig, MoEConfig], nn.Module],
) -> Iterator[nn.Module]:
    """The blocks of a model, dense or MoE as the configuration places them."""
    for layer in range(config.layers):
        if config.moe is not None and config.moe.is_moe_layer(layer):
            yield moe_block(config, config.moe)
        else:
            yield dense_block(config)


def build_moe_layer(config: ModelConfig, moe: MoEConfig, shared: nn.Module | None) -> MoELayer:
    options = dict(moe.options)
    gate = build_gate(moe.gate, config.width, moe.experts, moe.k, causal=config.causal, **options)
    experts = Experts(moe.experts, config.width, moe.ffn, activation=moe.activation, dropout=moe.dropout)
    return MoELayer(gate, experts, shared)


def validate_gate(moe: MoEConfig) -> list[ValidationIssue]:
    """Issues of the gate and its options."""
    try:
        options: dict[str, Any] = dict(moe.options)
        with torch.device("meta"):
            build_gate(moe.gate, 8, moe.experts, moe.k, **options)
    except ValidationError as error:
        return [replace(fault, key="gate", value=f"{fault.key}={fault.value}") for fault in error.issues]
    except (ValueError, TypeError) as error:
        return [ValidationIssue(key="gate", value=moe.gate, message=f"cannot be built: {error}")]
    return []
