"""Llama: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from echelon.kernels.linear import project
from echelon.kernels.norm import rms_norm, stream_norm
from echelon.kernels.swiglu import gated, swiglu
from echelon.models.attention import Attention, Seen, rotation
from echelon.models.language import LanguageModel
from echelon.models.linear import Linear, each, one_product
from echelon.models.sizes import ModelConfig

THETA = 500_000.0
EPSILON = 1e-5


class RMSNorm(nn.Module):
    remake = False
    """backward makes the output again instead of keeping it (memory/recompute.py)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPSILON, remake=self.remake)


class StreamNorm(RMSNorm):
    """The norm of a residual stream to which something is added first: it gives both."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + delta, its norm)"""
        return stream_norm(x, delta, self.weight, EPSILON, remake=self.remake)


class MLP(nn.Module):
    remake = False
    """backward makes what `down` reads again instead of keeping it"""
    share_input = ("gate", "up")
    """layers that read one input and are asked for their outputs together"""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(width, ffn, bias=False)
        self.up = Linear(width, ffn, bias=False)
        self.down = Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if one_product(x, self.gate, self.up):
            h = swiglu(project(x, self.gate, self.up), remake=self.remake)
        else:
            h = gated(*each(x, self.gate, self.up), remake=self.remake)
        out: Tensor = self.down(h)
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = StreamNorm(config.width)
        self.attn = Attention(config.width, config.heads, config.kv_heads, bias=False, dropout=config.dropout)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = StreamNorm(config.width)
        self.mlp = MLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        x, h = self.norm1(x)
        x, h = self.norm2(x, self.drop1(self.attn(h, seen)))
        out: Tensor = x + self.drop2(self.mlp(h))
        return out


class Llama(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.finish()

    def start(self, tokens: Tensor, seen: Seen) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens))
        return x

    def seen(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Seen:
        seen = super().seen(tokens, documents, positions)
        turn = rotation(seen.place, self.config.head_dim, THETA, next(self.parameters()).dtype)
        return replace(seen, turn=turn)
