"""GPT: learned positions, pre-LayerNorm, GELU, biases, dropout, tied embedding."""

from torch import Tensor, nn

from echelon.kernels.layers.gelu import gelu
from echelon.models.attention import Attention, AttentionContext
from echelon.models.language_model import LanguageModel
from echelon.models.layers import LayerNorm, Linear, ResidualLayerNorm
from echelon.models.model_config import ModelConfig
from echelon.models.transformer_block import TransformerBlock


class GPTMLP(nn.Module):
    recompute_output = False
    """backward recomputes the input of `down` instead of saving it (recompute=ops)"""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up = Linear(width, ffn)
        self.down = Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(gelu(self.up(x), recompute=self.recompute_output))
        return out


class GPTBlock(TransformerBlock):
    mlp_class, norm_class = GPTMLP, ResidualLayerNorm

    def build_attention(self, config: ModelConfig) -> nn.Module:
        return Attention(config, bias=True, out_bias=True)

    def attend(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        x, h = self.norm1(x)
        x, h = self.norm2(x, self.drop1(self.attn(h, context)))
        return x, h


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
