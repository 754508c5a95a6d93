"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1): q, k and v are projected from low-rank latents.

[Note: latent attention]

                            tensor-parallel region: a rank computes its heads
    x --q_down--> norm --+--q---> heads x (nope | rope)         queries; RoPE rotates the second part
    |                    |
    +--kv_down--> norm --+--kv--> heads x (nope | value)        keys without positions, and values
        |                |
        +--> key --------+------> rope, rotated                 shared by all heads, behind each head's `nope`

    scores = (q_nope k_nope' + q_rope k_rope') / sqrt(nope + rope), times YaRN's m^2 (attention_config.py)

The three latents enter the region concatenated: sequence parallelism gathers only these, and the GEMMs before them
compute a rank's own tokens. Without a `q_down` queries are projected from x, which then enters the region too.

RoPE rotates pairs (i, i + rope/2), as everywhere here (kernels/attention/rope.py). Published DeepSeek weights have
pairs (2i, 2i + 1): hf/param_names.py reorders the rows of `q` and `kv_down` that produce them.
"""

import torch
from torch import Tensor, nn

from echelon.kernels.attention.rope import apply_rotary
from echelon.models.attention import QKV, AttentionContext, CoreAttention, project_output
from echelon.models.attention_config import MLAConfig
from echelon.models.layers import Linear, RMSNorm, project_all


class LatentHeads(nn.Module):
    """From latents to the output of each head. The number of heads follows from the width of the projections."""

    def __init__(self, config: MLAConfig, query_source: int, heads: int, *, dropout: float, score_scale: float) -> None:
        super().__init__()
        self.config, self.score_scale = config, score_scale
        self.input_sizes = (query_source, config.kv_rank, config.rope_dim)
        """of the input: latent of queries, latent of keys and values, rotated part of the keys"""
        self.q = Linear(query_source, heads * config.head_dim, bias=False)
        self.kv = Linear(config.kv_rank, heads * (config.nope_dim + config.value_dim), bias=False)
        self.core = CoreAttention(dropout)

    def forward(self, latents: Tensor, context: AttentionContext) -> Tensor:
        """[B, T, heads x value_dim]"""
        assert context.rope is not None, "latent attention requires RoPE angles"
        query_latent, kv_latent, key = latents.split(self.input_sizes, dim=-1)
        y = self.core(self.q(query_latent), key, self.kv(kv_latent), context, self._prepare)
        out: Tensor = y.transpose(1, 2).flatten(2)
        return out

    def _prepare(self, query: Tensor, key: Tensor, kv: Tensor, context: AttentionContext) -> QKV:
        """Queries, keys and values from the outputs of `q` and `kv` and the rotated part of the keys."""
        config, rope = self.config, context.rope
        assert rope is not None
        q_nope, q_rope = _split_heads(query, config.nope_dim, config.rope_dim)
        k_nope, v = _split_heads(kv, config.nope_dim, config.value_dim)
        k_rope = apply_rotary(key.unsqueeze(1), rope).expand(-1, k_nope.shape[1], -1, -1)
        q, k = torch.cat((q_nope, apply_rotary(q_rope, rope)), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        # On the queries, so that every kernel and every split of attention may keep its own 1 / sqrt(head_dim).
        return q if self.score_scale == 1.0 else q * self.score_scale, k, v


class LatentAttention(nn.Module):
    """MLA: low-rank projections, heads, output projection."""

    recompute_output = False
    """`o` recomputes its input from what the core saved, instead of saving it once more in another dtype"""
    share_input = ("q_down", "kv_down")
    """layers with one input, called together"""

    def __init__(
        self, width: int, heads: int, config: MLAConfig, *, epsilon: float, dropout: float, score_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.config = config
        if config.query_rank:
            self.q_down = Linear(width, config.query_rank, bias=False)
            self.q_norm = RMSNorm(config.query_rank, epsilon)
        self.kv_down = Linear(width, config.kv_rank + config.rope_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_rank, epsilon)
        query_source = config.query_rank or width
        self.heads = LatentHeads(config, query_source, heads, dropout=dropout, score_scale=score_scale)
        self.o = Linear(heads * config.value_dim, width, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        return project_output(self.o, self.heads(self._compress(x), context), recompute=self.recompute_output)

    def _compress(self, x: Tensor) -> Tensor:
        """[B, T, ...]: the latents of queries, of keys and values, and the rotated part of the keys."""
        if self.config.query_rank:
            query, kv = project_all(x, self.q_down, self.kv_down)
            query = self.q_norm(query)
        else:
            query, kv = x, self.kv_down(x)
        kv, key = kv.split((self.config.kv_rank, self.config.rope_dim), dim=-1)
        return torch.cat((query, self.kv_norm(kv), key), dim=-1)


def _split_heads(x: Tensor, *dims: int) -> tuple[Tensor, Tensor]:
    """The two parts of every head, [B, H, T, dim] each."""
    first, second = x.unflatten(-1, (-1, sum(dims))).transpose(1, 2).split(dims, dim=-1)
    return first, second
