"""GPT: learned positions, pre-LayerNorm, GELU, biases, dropout, tied embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels import tensor_metadata
from echelon.models.attention import Attention, AttentionContext
from echelon.models.language_model import LanguageModel
from echelon.models.layers import Linear
from echelon.models.model_config import ModelConfig
from echelon.models.transformer_block import TransformerBlock


class LayerNorm(nn.LayerNorm):
    recompute_output = False
    """backward recomputes the output instead of saving it (recompute=ops)"""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        saved, forward = input.detach(), super().forward
        return tensor_metadata.attach_recompute(out, lambda: forward(saved)) if self.recompute_output else out


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
            tensor_metadata.attach_recompute(h, lambda: F.gelu(saved, approximate="tanh"))
        out: Tensor = self.down(h)
        return out


class GPTBlock(TransformerBlock):
    mlp_class, norm_class = GPTMLP, LayerNorm

    def build_attention(self, config: ModelConfig) -> nn.Module:
        return Attention(config, bias=True, out_bias=True)

    def attend(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        x = x + self.drop1(self.attn(self.norm1(x), context))
        return x, self.norm2(x)


class GPT(LanguageModel):
    embedding_modules = ("embed", "positions", "drop")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.positions = nn.Embedding(config.max_seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config, layer) for layer in range(config.layers))
        self.norm = LayerNorm(config.width, config.epsilon)
        self.add_head()

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        x: Tensor = self.drop(self.embed(tokens) + self.positions(context.positions))
        return x
