"""Heads of one product's output, rotated by their positions.

The rows of the product hold all query heads, then all key heads, then all value heads. The kernel rotates queries and
keys where they lie: nothing else reads what they were, so no second copy of them is kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import Note

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [1 or B, T, head_dim / 2], in 32 bits or more"""


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs (i, i + head_dim / 2) of x [B, H, T, head_dim]."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotated_heads(qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each [B, heads of it, T, head_dim], from [B, T, all heads]. What is given is used up."""
    if dispatch.fits(qkv):
        q, k, v = _RotatedHeads.apply(qkv, *rotation, heads, kv_heads)
        return q, k, v
    q, k, v = _views(qkv, heads, kv_heads)
    return rotate(q, rotation), rotate(k, rotation), v


def _views(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = split.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


class _RotatedHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from echelon.kernels.attention.rope_triton import rotate_

        ctx.save_for_backward(cos, sin)
        # `.data`: autograd need not know, as the product that made qkv does not keep it.
        whole = qkv.data.contiguous()
        rotate_(whole, cos, sin, heads + kv_heads, heads + 2 * kv_heads)
        return _views(whole, heads, kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        from echelon.kernels.attention.rope_triton import gather_rotated_back

        dqkv, largest = gather_rotated_back(*gradients, *ctx.saved_tensors)
        return tensor_metadata.write(dqkv, Note(largest=largest)), None, None, None, None
