"""RoPE: splits one GEMM's output into q, k and v heads, and rotates q and k by their positions.

Rows of the GEMM's output hold all query heads, then all key heads, then all value heads. The kernel rotates queries and
keys in place: nothing else reads the unrotated values, so backward saves no second copy of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata

Rotation = tuple[Tensor, Tensor]
"""(cos, sin), each [1 or B, T, head_dim / 2], in fp32 or fp64"""


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x [B, H, T, head_dim]."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def split_and_rotate_qkv(qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each [B, heads, T, head_dim], from qkv [B, T, all heads], which may be overwritten."""
    if dispatch.use_triton(qkv):
        q, k, v = _SplitAndRotateQKV.apply(qkv, *rotation, heads, kv_heads)
        return q, k, v
    q, k, v = _split_heads(qkv, heads, kv_heads)
    return apply_rotary(q, rotation), apply_rotary(k, rotation), v


def split_qkv(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each [B, heads, T, head_dim], from qkv [B, T, all heads]."""
    q, k, v = _SplitQKV.apply(qkv, heads, kv_heads)
    return q, k, v


def _split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


class _SplitAndRotateQKV(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from echelon.kernels.attention.rope_triton import apply_rotary_

        ctx.save_for_backward(cos, sin)
        # `.data` hides the in-place change from autograd: the GEMM that made qkv does not save it.
        rotated = qkv.data.contiguous()
        apply_rotary_(rotated, cos, sin, heads + kv_heads, heads + 2 * kv_heads)
        return _split_heads(rotated, heads, kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        from echelon.kernels.attention.rope_triton import rotary_backward

        dqkv, amax = rotary_backward(*gradients, *ctx.saved_tensors)
        return tensor_metadata.attach(dqkv, TensorMetadata(row_amax=amax)), None, None, None, None


class _SplitQKV(Function):
    """Views; backward writes the three gradients side by side, in the order in which the GEMM reads them."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return _split_heads(qkv, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([gradient.transpose(1, 2) for gradient in gradients], dim=2).flatten(2), None, None
