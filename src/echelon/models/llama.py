"""Llama: pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from torch import Tensor, nn

from echelon.kernels.attention.rope import Rotation
from echelon.kernels.gemm.fused_linear import project
from echelon.kernels.layers.swiglu import silu_mul, swiglu
from echelon.models.attention import Attention, AttentionContext, QKNormAttention, rope_angles
from echelon.models.language_model import LanguageModel
from echelon.models.layers import Linear, ResidualRMSNorm, RMSNorm, can_fuse_gemm, project_all
from echelon.models.mla import LatentAttention
from echelon.models.model_config import ModelConfig
from echelon.models.transformer_block import TransformerBlock


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


class LlamaBlock(TransformerBlock):
    mlp_class, norm_class = LlamaMLP, ResidualRMSNorm

    def build_attention(self, config: ModelConfig) -> nn.Module:
        """MLA, with QK norm, or grouped-query."""
        if config.mla is not None:
            score_scale = config.rope_scaling.score_scale if config.rope_scaling is not None else 1.0
            options = {"epsilon": config.epsilon, "dropout": config.dropout, "score_scale": score_scale}
            return LatentAttention(config.width, config.heads, config.mla, **options)
        return (QKNormAttention if config.qk_norm else Attention)(config, bias=config.qkv_bias)

    def attend(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        x, h = self.norm1(x)
        x, h = self.norm2(x, self.drop1(self.attn(h, context)))
        return x, h


class Llama(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(LlamaBlock(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.epsilon)
        self.add_head()

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens))
        return x

    def rope(self, positions: Tensor) -> Rotation:
        config, dtype = self.config, next(self.parameters()).dtype
        return rope_angles(positions, config.rope_dim, config.theta, dtype, config.rope_scaling)
