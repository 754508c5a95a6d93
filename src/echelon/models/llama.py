"""Llama: pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from dataclasses import replace

from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import project
from echelon.kernels.layers.swiglu import silu_mul, swiglu
from echelon.models.attention import Attention, AttentionContext, QKNormAttention, rope_angles
from echelon.models.language_model import LanguageModel
from echelon.models.layers import Linear, ResidualRMSNorm, RMSNorm, can_fuse_gemm, project_all
from echelon.models.mla import LatentAttention
from echelon.models.model_config import ModelConfig
from echelon.models.moe_block import build_blocks, build_moe_layer
from echelon.models.moe_config import MoEConfig


class LlamaMLP(nn.Module):
    recompute_output = False
    """backward recomputes the input of `down` instead of saving it (recompute=ops)"""
    share_input = ("gate", "up")
    """layers with one input, called together"""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(width, ffn, bias=False)
        self.up = Linear(width, ffn, bias=False)
        self.down = Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if can_fuse_gemm(x, self.gate, self.up):
            h = swiglu(project(x, self.gate, self.up), recompute=self.recompute_output)
        else:
            h = silu_mul(*project_all(x, self.gate, self.up), recompute=self.recompute_output)
        out: Tensor = self.down(h)
        return out


def build_attention(config: ModelConfig) -> nn.Module:
    """The attention module of a configuration: MLA, with QK norm, or grouped-query."""
    width, heads, kv_heads, dropout = config.width, config.heads, config.kv_heads, config.dropout
    if config.mla is not None:
        return LatentAttention(width, heads, config.mla, epsilon=config.epsilon, dropout=dropout)
    if config.qk_norm:
        return QKNormAttention(
            width,
            heads,
            kv_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            epsilon=config.epsilon,
            dropout=dropout,
        )
    return Attention(width, heads, kv_heads, head_dim=config.head_dim, bias=config.qkv_bias, dropout=dropout)


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = ResidualRMSNorm(config.width, config.epsilon)
        self.attn = build_attention(config)
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = ResidualRMSNorm(config.width, config.epsilon)
        self.mlp: nn.Module = LlamaMLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x, h = self._attend(x, context)
        out: Tensor = x + self.drop2(self.mlp(h))
        return out

    def _attend(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and its norm."""
        x, h = self.norm1(x)
        x, h = self.norm2(x, self.drop1(self.attn(h, context)))
        return x, h


class LlamaMoEBlock(LlamaBlock):
    """A block with an MoE layer. It also returns the balance losses [B]."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__(config)
        shared = LlamaMLP(config.width, moe.shared_ffn) if moe.shared_ffn else None
        self.mlp = build_moe_layer(config, moe, shared)

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, h = self._attend(x, context)
        y, losses = self.mlp(h)
        return x + self.drop2(y), losses


class Llama(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(build_blocks(config, LlamaBlock, LlamaMoEBlock))
        self.norm = RMSNorm(config.width, config.epsilon)
        self.add_head()

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens))
        return x

    def attention_context(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> AttentionContext:
        context = super().attention_context(tokens, documents, positions)
        config, dtype = self.config, next(self.parameters()).dtype
        rope = rope_angles(context.positions, config.rope_dim, config.theta, dtype, config.rope_scaling)
        return replace(context, rope=rope)
