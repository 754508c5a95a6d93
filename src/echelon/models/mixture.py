"""Mixtures of experts in our models: which layers have them, and how they are made of their configuration."""

from collections.abc import Callable, Iterator

from torch import nn

from echelon.models.mixture_config import MixtureConfig
from echelon.models.sizes import ModelConfig
from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.layer import Mixture


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
