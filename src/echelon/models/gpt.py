"""GPT: learned positions, pre-LayerNorm, GELU, biases, dropout, tied embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels import tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.models.attention import Attention, AttentionContext
from echelon.models.language_model import LanguageModel
from echelon.models.layers import Linear
from echelon.models.model_config import ModelConfig
from echelon.models.moe_block import build_blocks, build_moe_layer
from echelon.models.moe_config import MoEConfig


class LayerNorm(nn.LayerNorm):
    recompute_output = False
    """backward recomputes the output instead of saving it (recompute=ops)"""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        saved, forward = input.detach(), super().forward
        return (
            tensor_metadata.attach(out, TensorMetadata(recompute=lambda _gradient: forward(saved)))
            if self.recompute_output
            else out
        )


class GPTMLP(nn.Module):
    recompute_output = False
    """backward recomputes the input of `down` instead of saving it (recompute=ops)"""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up = Linear(width, ffn)
        self.down = Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        h = F.gelu(up, approximate="tanh")
        if self.recompute_output:
            saved = up.detach()
            tensor_metadata.attach(h, TensorMetadata(recompute=lambda _gradient: F.gelu(saved, approximate="tanh")))
        out: Tensor = self.down(h)
        return out


class GPTBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.width, config.epsilon)
        self.attn = Attention(
            config.width, config.heads, config.kv_heads, bias=True, out_bias=True, dropout=config.dropout
        )
        self.drop1 = nn.Dropout(config.dropout)
        self.norm2 = LayerNorm(config.width, config.epsilon)
        self.mlp: nn.Module = GPTMLP(config.width, config.ffn)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.drop1(self.attn(self.norm1(x), context))
        out: Tensor = x + self.drop2(self.mlp(self.norm2(x)))
        return out


class GPTMoEBlock(GPTBlock):
    """A block with an MoE layer. It also returns the balance losses [B]."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__(config)
        self.mlp = build_moe_layer(config, moe, GPTMLP(config.width, moe.shared_ffn) if moe.shared_ffn else None)

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.drop1(self.attn(self.norm1(x), context))
        y, losses = self.mlp(self.norm2(x))
        return x + self.drop2(y), losses


class GPT(LanguageModel):
    embedding_modules = ("embed", "positions", "drop")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(config.max_seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(build_blocks(config, GPTBlock, GPTMoEBlock))
        self.norm = LayerNorm(config.width, config.epsilon)
        self.add_head()

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens) + self.positions(context.positions))
        return x
