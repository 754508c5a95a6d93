"""The transformer block of both model families: attention, then a dense MLP or an MoE layer."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models.attention import AttentionContext
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.gates.gate import Gate
from echelon.moe.moe_layer import MoELayer

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""output of a block: [B, T, width], and after the first MoE layer the sum of each sequence's balance losses, [B]"""


class TransformerBlock(nn.Module):
    """A block whose MLP is dense or, where the configuration places them, an MoE layer with its balance losses."""

    mlp_class: ClassVar[type[nn.Module]]
    norm_class: ClassVar[type[nn.Module]]

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = self.norm_class(config.width, config.epsilon)
        self.attn = self.build_attention(config)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = self.norm_class(config.width, config.epsilon)
        self.mlp = self._build_mlp(config, layer)
        self.drop2 = nn.Dropout(config.dropout)

    def build_attention(self, config: ModelConfig) -> nn.Module:
        raise NotImplementedError

    def attend(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and its norm."""
        raise NotImplementedError

    def forward(self, x: Tensor, context: AttentionContext) -> HiddenStates:
        x, h = self.attend(x, context)
        y, losses = split_hidden(self.mlp(h))
        x = x + self.drop2(y)
        return x if losses is None else (x, losses)

    def _build_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        moe = config.moe
        if moe is None or not moe.is_moe_layer(layer):
            return self.mlp_class(config.width, config.ffn)
        shared = self.mlp_class(config.width, moe.shared_ffn) if moe.shared_ffn else None
        gate = _build_gate(moe, config.width, causal=config.causal)
        experts = Experts(moe.experts, config.width, moe.ffn, activation=moe.activation, dropout=moe.dropout)
        return MoELayer(gate, experts, shared)


def _build_gate(moe: MoEConfig, width: int, *, causal: bool) -> Gate:
    options: dict[str, Any] = dict(moe.options)
    return build_gate(moe.gate, width, moe.experts, moe.k, causal=causal, **options)


def split_hidden(hidden: HiddenStates) -> tuple[Tensor, Tensor | None]:
    return (hidden, None) if isinstance(hidden, Tensor) else hidden


def run_block(block: nn.Module, hidden: HiddenStates, context: AttentionContext) -> HiddenStates:
    """Run a dense or MoE block, and add the balance losses of an MoE block to those before it."""
    x, total = split_hidden(hidden)
    x, losses = split_hidden(block(x, context))
    if total is not None:
        losses = total if losses is None else total + losses
    return x if losses is None else (x, losses)


def validate_gate(moe: MoEConfig) -> list[ValidationIssue]:
    """Issues of the gate and its options."""
    try:
        with torch.device("meta"):
            _build_gate(moe, 8, causal=False)
    except ValidationError as error:
        return [replace(issue, key="gate", value=f"{issue.key}={issue.value}") for issue in error.issues]
    except (ValueError, TypeError) as error:
        return [ValidationIssue(key="gate", value=moe.gate, message=f"cannot be built: {error}")]
    return []
