"""Llama: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases."""

from dataclasses import replace

from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import project
from echelon.kernels.layers.swiglu import gated, swiglu
from echelon.models.attention import Attention, Seen, rotation
from echelon.models.language_model import LanguageModel
from echelon.models.linear_layer import Linear, each, one_product
from echelon.models.mla import LatentAttention
from echelon.models.model_config import ModelConfig
from echelon.models.moe_block import build_mixture, layers
from echelon.models.moe_config import MixtureConfig
from echelon.models.norm_layers import RMSNorm, StreamNorm
from echelon.models.qk_norm import NormedAttention


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


def attention(config: ModelConfig) -> nn.Module:
    """The kind of attention that a configuration asks for."""
    width, heads, kv_heads, dropout = config.width, config.heads, config.kv_heads, config.dropout
    if config.latent is not None:
        return LatentAttention(width, heads, config.latent, epsilon=config.epsilon, dropout=dropout)
    if config.head_norms:
        return NormedAttention(
            width,
            heads,
            kv_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            epsilon=config.epsilon,
            dropout=dropout,
        )
    return Attention(width, heads, kv_heads, head_dim=config.head_dim, bias=config.qkv_bias, dropout=dropout)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = StreamNorm(config.width, config.epsilon)
        self.attn = attention(config)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = StreamNorm(config.width, config.epsilon)
        self.mlp: nn.Module = MLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        x, h = self._attended(x, seen)
        out: Tensor = x + self.drop2(self.mlp(h))
        return out

    def _attended(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The stream after attention, and its norm."""
        x, h = self.norm1(x)
        x, h = self.norm2(x, self.drop1(self.attn(h, seen)))
        return x, h


class MixtureBlock(Block):
    """A block with experts. It also gives their balance losses [B]."""

    def __init__(self, config: ModelConfig, mixture: MixtureConfig) -> None:
        super().__init__(config)
        shared = MLP(config.width, mixture.shared) if mixture.shared else None
        self.mlp = build_mixture(config, mixture, shared)

    def forward(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, h = self._attended(x, seen)
        y, losses = self.mlp(h)
        return x + self.drop2(y), losses


class Llama(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(layers(config, Block, MixtureBlock))
        self.norm = RMSNorm(config.width, config.epsilon)
        self.finish()

    def start(self, tokens: Tensor, seen: Seen) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens))
        return x

    def seen(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Seen:
        seen = super().seen(tokens, documents, positions)
        config, dtype = self.config, next(self.parameters()).dtype
        turn = rotation(seen.place, config.rope_dim, config.theta, dtype, config.stretch)
        return replace(seen, turn=turn)
