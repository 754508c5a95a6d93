"""RMSNorm kernels: a program processes full rows, so a row stays in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import persistent_grid, row_block, warps_per_row


@triton.jit
def _norm_forward(
    x_ptr, delta_ptr, w_ptr, s_ptr, normed_ptr, scale_ptr, amax_ptr, width, eps,
    HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * width + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(s_ptr + row * width + column, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * scale * w).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * width + column, normed, mask=mask)
    tl.store(scale_ptr + row, scale)
    tl.store(amax_ptr + row, tl.max(tl.abs(normed.to(tl.float32)), axis=0))


@triton.jit
def _norm_recompute(s_ptr, scale_ptr, w_ptr, normed_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    wide = tl.load(s_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = wide * tl.load(scale_ptr + row) * w
    tl.store(normed_ptr + row * width + column, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    dnormed_ptr, ds_ptr, s_ptr, scale_ptr, w_ptr, dx_ptr, parts_ptr, amax_ptr, rows, width,
    EACH: tl.constexpr, HAS_STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = ds + scale (g - n mean(g n)) with n = s scale, g = dnormed w; dw = sum of dnormed n over rows."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(EACH):
        row = (program + step * tl.num_programs(0)).to(tl.int64)
        mask = inside & (row < rows)
        at = row * width + column
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
        n = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
        dnormed = tl.load(dnormed_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dw += dnormed * n
        g = dnormed * w
        dx = scale * (g - n * (tl.sum(g * n, axis=0) / width))
        if HAS_STREAM:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        out = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, out, mask=mask)
        tl.store(amax_ptr + row, tl.max(tl.abs(out.to(tl.float32)), axis=0), mask=row < rows)
    tl.store(parts_ptr + program.to(tl.int64) * width + column, dw, mask=inside)


def forward(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x + delta, its norm, 1/rms of each row, absolute maximum of each row of the norm)."""
    x = x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    s = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    scale, amax = x.new_empty(2, rows, dtype=torch.float32).unbind(0)
    other: Any = x if delta is None else delta.contiguous()
    block = row_block(width)
    _norm_forward[(rows,)](
        x, other, weight, s, normed, scale, amax, width, eps,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=warps_per_row(block),
    )  # fmt: skip
    return s, normed, scale, amax


def apply_scale(s: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Recompute the norm of s from the saved 1/rms of each row."""
    normed, width = torch.empty_like(s), s.shape[-1]
    block = row_block(width)
    _norm_recompute[(s.numel() // width,)](s, scale, weight, normed, width, BLOCK=block, num_warps=warps_per_row(block))
    return normed


def backward(
    grad_normed: Tensor, grad_residual: Tensor | None, s: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gradient of the stream, of the weight, absolute maximum of each row of the first)."""
    grad_normed = grad_normed.contiguous()
    width, rows = s.shape[-1], s.numel() // s.shape[-1]
    block = row_block(width)
    count, each = persistent_grid(rows, block, s.device)
    dx, parts = torch.empty_like(s), s.new_empty(count, width, dtype=torch.float32)
    amax = s.new_empty(rows, dtype=torch.float32)
    stream: Any = grad_normed if grad_residual is None else grad_residual.contiguous()
    _norm_backward[(count,)](
        grad_normed, stream, s, scale, weight, dx, parts, amax, rows, width,
        EACH=triton.cdiv(rows, count), HAS_STREAM=grad_residual is not None, BLOCK=block, num_warps=each,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype), amax
