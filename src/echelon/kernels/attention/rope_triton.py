"""RoPE kernels: a program processes all heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import row_block


@triton.jit
def _rope_forward(
    x_ptr, cos_ptr, sin_ptr, length, table_rows, HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token % length if table_rows == 1 else token
    head, i = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    cos = tl.load(cos_ptr + place * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + place * HALF + i, mask=i < HALF, other=0.0)
    at = x_ptr + token * ALL_HEADS * 2 * HALF + head * 2 * HALF + i
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_back(
    d_ptr, stride_b, stride_h, stride_t, cos, sin, out, row, t, HEADS: tl.constexpr, HALF: tl.constexpr,
    ROTATE: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the heads of one gradient to `out`, rotated back if ROTATE; return their absolute maximum."""
    head, i = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (i < HALF)
    at = d_ptr + row * stride_b + head.to(tl.int64) * stride_h + t * stride_t + i
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        rotated = a * cos + b * sin
        b = b * cos - a * sin
        a = rotated
    low, high = a.to(out.dtype.element_ty), b.to(out.dtype.element_ty)
    tl.store(out + head * 2 * HALF + i, low, mask=mask)
    tl.store(out + head * 2 * HALF + HALF + i, high, mask=mask)
    return tl.max(tl.maximum(tl.abs(low.to(tl.float32)), tl.abs(high.to(tl.float32))))


@triton.jit
def _rope_backward(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, out_ptr, amax_ptr, length, table_rows,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, t = token // length, token % length
    place = t if table_rows == 1 else token
    i = tl.arange(0, HALF_BLOCK)[None, :]
    cos = tl.load(cos_ptr + place * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + place * HALF + i, mask=i < HALF, other=0.0)
    out = out_ptr + token * (HEADS + 2 * KV) * 2 * HALF
    q = _rotate_back(dq_ptr, q_b, q_h, q_t, cos, sin, out, row, t, HEADS, HALF, True, HEAD_BLOCK, HALF_BLOCK)
    out += HEADS * 2 * HALF
    k = _rotate_back(dk_ptr, k_b, k_h, k_t, cos, sin, out, row, t, KV, HALF, True, KV_BLOCK, HALF_BLOCK)
    out += KV * 2 * HALF
    v = _rotate_back(dv_ptr, v_b, v_h, v_t, cos, sin, out, row, t, KV, HALF, False, KV_BLOCK, HALF_BLOCK)
    tl.store(amax_ptr + token, tl.maximum(q, tl.maximum(k, v)))


def apply_rotary_(x: Tensor, cos: Tensor, sin: Tensor, heads: int, all_heads: int) -> None:
    """Rotate the first `heads` of all heads of x [B, T, all_heads * head_dim] in place."""
    half = cos.shape[-1]
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    _rope_forward[(x.shape[0] * x.shape[1],)](
        x, cos, sin, x.shape[1], cos.shape[0],
        HEADS=heads, ALL_HEADS=all_heads, HALF=half,
        HEAD_BLOCK=row_block(heads), HALF_BLOCK=row_block(half), num_warps=4,
    )  # fmt: skip


def rotary_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient of qkv [B, T, all heads], absolute maximum of each of its rows)."""
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    batch, heads, length, head_dim = dq.shape
    kv_heads, half = dk.shape[1], cos.shape[-1]
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = dq.new_empty(batch, length, (heads + 2 * kv_heads) * head_dim)
    amax = dq.new_empty(batch * length, dtype=torch.float32)
    _rope_backward[(batch * length,)](
        dq, dk, dv, cos, sin, out, amax, length, cos.shape[0],
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, KV=kv_heads, HALF=half,
        HEAD_BLOCK=row_block(heads), KV_BLOCK=row_block(kv_heads), HALF_BLOCK=row_block(half), num_warps=4,
    )  # fmt: skip
    return out, amax
