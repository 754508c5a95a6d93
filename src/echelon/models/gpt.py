"""GPT: learned positions, LayerNorm before each part, GELU, biases, dropout, tied embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.models.attention import Attention, Seen
from echelon.models.language import LanguageModel
from echelon.models.sizes import ModelConfig


class MLP(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config.width, config.heads, config.kv_heads, bias=True, dropout=config.dropout)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x), mask))
        out: Tensor = x + self.drop2(self.mlp(self.norm2(x)))
        return out


class GPT(LanguageModel):
    first = ("embed", "positions", "drop")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(config.max_seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.finish()

    def start(self, tokens: Tensor, seen: Seen) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens) + self.positions(seen.place))
        return x
