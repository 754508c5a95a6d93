"""Mixtures of experts in our models: which layers have them, and how they are made of their configuration."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from echelon.layout.validation_error import Fault, FaultError
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MixtureConfig
from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.moe_layer import Mixture


def layers(
    config: ModelConfig,
    plain: Callable[[ModelConfig], nn.Module],
    mixed: Callable[[ModelConfig, MixtureConfig], nn.Module],
) -> Iterator[nn.Module]:
    """The blocks of a model, with experts in those that the configuration names."""
    for layer in range(config.layers):
        if config.mixture is not None and config.mixture.is_mixture(layer):
            yield mixed(config, config.mixture)
        else:
            yield plain(config)


def build_mixture(config: ModelConfig, mixture: MixtureConfig, shared: nn.Module | None) -> Mixture:
    options = dict(mixture.options)
    gate = build_gate(mixture.gate, config.width, mixture.experts, mixture.k, causal=config.causal, **options)
    experts = Experts(
        mixture.experts, config.width, mixture.ffn, activation=mixture.activation, dropout=mixture.dropout
    )
    return Mixture(gate, experts, shared)


def gate_faults(mixture: MixtureConfig) -> list[Fault]:
    """What is wrong with a mixture's gate and its options."""
    try:
        options: dict[str, Any] = dict(mixture.options)
        with torch.device("meta"):
            build_gate(mixture.gate, 8, mixture.experts, mixture.k, **options)
    except FaultError as error:
        return [replace(fault, key="gate", value=f"{fault.key}={fault.value}") for fault in error.faults]
    except (ValueError, TypeError) as error:
        return [Fault(key="gate", value=mixture.gate, rule=f"cannot be built: {error}")]
    return []
