"""Llama: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.models.attention import Attention, Rotation, Seen, rotation
from echelon.models.language import LanguageModel
from echelon.models.sizes import ModelConfig

THETA = 500_000.0
EPSILON = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON)


class MLP(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.width)
        self.attn = Attention(config.width, config.heads, config.kv_heads, bias=False, dropout=config.dropout)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = RMSNorm(config.width)
        self.mlp = MLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x), mask, rotation))
        out: Tensor = x + self.drop2(self.mlp(self.norm2(x)))
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

    def seen(self, tokens: Tensor, documents: Tensor | None = None) -> Seen:
        seen = super().seen(tokens, documents)
        turn = rotation(seen.place, self.config.head_dim, THETA, next(self.parameters()).dtype)
        return replace(seen, turn=turn)

    def given(self, seen: Seen) -> tuple[Tensor | None, Rotation | None]:
        return seen.mask, seen.turn
