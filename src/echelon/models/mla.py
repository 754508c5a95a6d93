"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): all that is made of a token passes narrow vectors.

[Note: latent attention]

                            region: a rank works on its own heads
    x --q_down--> norm --+--q---> heads x (nope | rope)         queries; the second part turns with the position
    |                    |
    +--kv_down--> norm --+--kv--> heads x (nope | value)        keys without positions, and values
        |                |
        +--> key --------+------> rope, turned                  one for all heads, behind each head's `nope`

    scores = (q_nope k_nope' + q_rope k_rope') / sqrt(nope + rope)

What passes into the region is the three narrow vectors side by side: under sequence parallelism that is all that is
gathered, and the products before it work on a rank's own tokens. Without a `q_down` queries are made of x, which then
passes too.

Turned pairs are (i, i + rope/2), as everywhere here (kernels/attention/rope.py). Published DeepSeek weights have them side by
side, (2i, 2i + 1): names.py puts the rows of `q` and `kv_down` that make them into our order.
"""

import torch
from torch import Tensor, nn

from echelon.kernels import tensor_metadata
from echelon.kernels.attention.rope import apply_rotary
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.models.attention import QKV, AttentionContext, CoreAttention
from echelon.models.attention_config import MLAConfig
from echelon.models.layers import Linear, RMSNorm, project_all


class LatentHeads(nn.Module):
    """From narrow vectors to what each head gives. How many heads is read from the projections' width."""

    def __init__(self, latent: MLAConfig, query_source: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.config = latent
        self.input_sizes = (query_source, latent.kv_rank, latent.rope_dim)
        """of what is read: for queries, for keys and values, the turning part of the keys"""
        self.q = Linear(query_source, heads * latent.head_dim, bias=False)
        self.kv = Linear(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.core = CoreAttention(dropout)

    def forward(self, narrow: Tensor, context: AttentionContext) -> Tensor:
        """[B, T, heads x value_dim]"""
        assert context.rope is not None, "latent attention turns by the position, and there are no angles"
        of_query, of_kv, of_key = narrow.split(self.input_sizes, dim=-1)
        y = self.core(self.q(of_query), of_key, self.kv(of_kv), context, self._prepare)
        out: Tensor = y.transpose(1, 2).flatten(2)
        return out

    def _prepare(self, query: Tensor, key: Tensor, kv: Tensor, context: AttentionContext) -> QKV:
        """The note's second half, from what `q` and `kv` made and the turning part of the keys."""
        latent, turn = self.config, context.rope
        assert turn is not None
        q_nope, q_rope = _split_heads(query, latent.nope_dim, latent.rope_dim)
        k_nope, v = _split_heads(kv, latent.nope_dim, latent.value_dim)
        k_rope = apply_rotary(key.unsqueeze(1), turn).expand(-1, k_nope.shape[1], -1, -1)
        q, k = torch.cat((q_nope, apply_rotary(q_rope, turn)), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        return q, k, v


class LatentAttention(nn.Module):
    recompute_output = False
    """what `o` reads is found where attention keeps it, and not kept once more in another type"""
    share_input = ("q_down", "kv_down")
    """layers that read one input and are asked for their outputs together"""

    def __init__(self, width: int, heads: int, latent: MLAConfig, *, epsilon: float, dropout: float) -> None:
        super().__init__()
        self.config = latent
        if latent.query_rank:
            self.q_down = Linear(width, latent.query_rank, bias=False)
            self.q_norm = RMSNorm(latent.query_rank, epsilon)
        self.kv_down = Linear(width, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, epsilon)
        self.heads = LatentHeads(latent, latent.query_rank or width, heads, dropout=dropout)
        self.o = Linear(heads * latent.value_dim, width, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        y = self.heads(self._compress(x), context)
        if self.recompute_output:
            kept = y.detach()
            tensor_metadata.attach(y, TensorMetadata(recompute=lambda _gradient: kept))
        out: Tensor = self.o(y)
        return out

    def _compress(self, x: Tensor) -> Tensor:
        """[B, T, ...]: what queries, what keys and values, and what the turning part of the keys are made of."""
        if self.config.query_rank:
            query, kv = project_all(x, self.q_down, self.kv_down)
            query = self.q_norm(query)
        else:
            query, kv = x, self.kv_down(x)
        kv, key = kv.split((self.config.kv_rank, self.config.rope_dim), dim=-1)
        return torch.cat((query, self.kv_norm(kv), key), dim=-1)


def _split_heads(x: Tensor, *dims: int) -> tuple[Tensor, Tensor]:
    """Both parts of every head, [B, H, T, dim] each."""
    first, second = x.unflatten(-1, (-1, sum(dims))).transpose(1, 2).split(dims, dim=-1)
    return first, second
