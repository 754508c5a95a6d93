"""Attention whose queries and keys pass a norm, head by head (Qwen3): scores cannot grow with the weights."""

from torch import Tensor

from echelon.kernels.attention.rope import apply_rotary
from echelon.models.attention import QKV, Attention, AttentionContext
from echelon.models.norm_layers import RMSNorm


class QKNormAttention(Attention):
    fuses_rope = False

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        *,
        head_dim: int,
        bias: bool = False,
        epsilon: float,
        dropout: float,
    ) -> None:
        super().__init__(width, heads, kv_heads, head_dim=head_dim, bias=bias, dropout=dropout)
        self.q_norm, self.k_norm = RMSNorm(head_dim, epsilon), RMSNorm(head_dim, epsilon)

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> QKV:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        return (q, k, v) if context.rope is None else (apply_rotary(q, context.rope), apply_rotary(k, context.rope), v)
