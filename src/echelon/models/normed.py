"""Attention whose queries and keys pass a norm, head by head (Qwen3): scores cannot grow with the weights."""

from torch import Tensor

from echelon.kernels.rope import Rotation, rotate
from echelon.models.attention import Attention
from echelon.models.linear import each
from echelon.models.norm import RMSNorm


class NormedAttention(Attention):
    def __init__(self, width: int, heads: int, kv_heads: int, *, head_dim: int, epsilon: float, dropout: float) -> None:
        super().__init__(width, heads, kv_heads, head_dim=head_dim, bias=False, dropout=dropout)
        self.q_norm, self.k_norm = RMSNorm(head_dim, epsilon), RMSNorm(head_dim, epsilon)

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in each(x, self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)
