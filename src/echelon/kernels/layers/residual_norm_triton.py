"""RMSNorm and LayerNorm kernels: a program processes full rows, so a row stays in registers.

LayerNorm subtracts each row's mean and adds a bias (`IS_LAYER_NORM`); RMSNorm does neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import persistent_grid, row_block, warps_per_row


@triton.jit
def _norm_forward(
    x_ptr, delta_ptr, w_ptr, b_ptr, s_ptr, normed_ptr, scale_ptr, mean_ptr, amax_ptr, width, eps,
    HAS_DELTA: tl.constexpr, IS_LAYER_NORM: tl.constexpr, BLOCK: tl.constexpr,
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
    if IS_LAYER_NORM:
        mean = tl.sum(wide, axis=0) / width
        wide = tl.where(mask, wide - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    wide = wide * scale * w
    if IS_LAYER_NORM:
        wide += tl.load(b_ptr + column, mask=mask, other=0.0).to(tl.float32)
    normed = wide.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * width + column, normed, mask=mask)
    tl.store(scale_ptr + row, scale)
    tl.store(amax_ptr + row, tl.max(tl.abs(normed.to(tl.float32)), axis=0))


@triton.jit
def _norm_recompute(
    s_ptr, scale_ptr, mean_ptr, w_ptr, b_ptr, normed_ptr, width, IS_LAYER_NORM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    wide = tl.load(s_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if IS_LAYER_NORM:
        wide -= tl.load(mean_ptr + row)
    normed = wide * tl.load(scale_ptr + row) * w
    if IS_LAYER_NORM:
        normed += tl.load(b_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * width + column, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    dnormed_ptr, ds_ptr, s_ptr, scale_ptr, mean_ptr, w_ptr, dx_ptr, parts_ptr, amax_ptr, rows, width,
    EACH: tl.constexpr, HAS_STREAM: tl.constexpr, IS_LAYER_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = ds + scale (g - mean(g) - n mean(g n)) with n = (s - mean) scale, g = dnormed w; sums over rows in parts.

    The means of s and g are LayerNorm's, as are the second and third sum: that of dnormed, and that of dx.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    db = tl.zeros((BLOCK,), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(EACH):
        row = (program + step * tl.num_programs(0)).to(tl.int64)
        mask = inside & (row < rows)
        at = row * width + column
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
        n = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if IS_LAYER_NORM:
            n = tl.where(mask, n - tl.load(mean_ptr + row, mask=row < rows, other=0.0), 0.0)
        n = n * scale
        dnormed = tl.load(dnormed_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dw += dnormed * n
        g = dnormed * w
        dx = g - n * (tl.sum(g * n, axis=0) / width)
        if IS_LAYER_NORM:
            db += dnormed
            dx -= tl.sum(g, axis=0) / width
        dx = scale * dx
        if HAS_STREAM:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        out = dx.to(dx_ptr.dtype.element_ty)
        if IS_LAYER_NORM:
            sums += tl.where(mask, out.to(tl.float32), 0.0)
        tl.store(dx_ptr + at, out, mask=mask)
        tl.store(amax_ptr + row, tl.max(tl.abs(tl.where(mask, out.to(tl.float32), 0.0)), axis=0), mask=row < rows)
    at = program.to(tl.int64) * width + column
    tl.store(parts_ptr + at, dw, mask=inside)
    if IS_LAYER_NORM:
        size = tl.num_programs(0).to(tl.int64) * width
        tl.store(parts_ptr + size + at, db, mask=inside)
        tl.store(parts_ptr + 2 * size + at, sums, mask=inside)


@dataclass(frozen=True)
class NormOutput:
    """What a norm computes of rows, and what its backward needs of them."""

    s: Tensor
    """x + delta"""
    normed: Tensor
    scale: Tensor
    """[rows]: one over the root of the mean square, or the standard deviation"""
    mean: Tensor | None
    """[rows]: LayerNorm's"""
    row_amax: Tensor


def forward(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> NormOutput:
    """Norm of x + delta: LayerNorm with a bias, else RMSNorm."""
    x = x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    s = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    scale, amax, mean = x.new_empty(3, rows, dtype=torch.float32).unbind(0)
    other: Any = x if delta is None else delta.contiguous()
    block = row_block(width)
    _norm_forward[(rows,)](
        x, other, weight, weight if bias is None else bias, s, normed, scale, mean, amax, width, eps,
        HAS_DELTA=delta is not None, IS_LAYER_NORM=bias is not None, BLOCK=block, num_warps=warps_per_row(block),
    )  # fmt: skip
    return NormOutput(s, normed, scale, None if bias is None else mean, amax)


def recompute(s: Tensor, scale: Tensor, mean: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Recompute the norm of s from what forward saved of each row."""
    normed, width = torch.empty_like(s), s.shape[-1]
    block = row_block(width)
    _norm_recompute[(s.numel() // width,)](
        s, scale, scale if mean is None else mean, weight, weight if bias is None else bias, normed, width,
        IS_LAYER_NORM=mean is not None, BLOCK=block, num_warps=warps_per_row(block),
    )  # fmt: skip
    return normed


@dataclass(frozen=True)
class NormGradients:
    """Gradients of a norm, and what it knows of that of the stream."""

    stream: Tensor
    weight: Tensor
    bias: Tensor | None
    row_amax: Tensor
    """[rows]: of the stream's"""
    column_sums: Tensor | None
    """[width]: of the stream's, which are the gradient of a bias that was added to it"""


def backward(
    grad_normed: Tensor,
    grad_residual: Tensor | None,
    s: Tensor,
    scale: Tensor,
    mean: Tensor | None,
    weight: Tensor,
) -> NormGradients:
    """Gradients given those of the norm and of the stream s; LayerNorm's where `mean` is given."""
    grad_normed = grad_normed.contiguous()
    width, rows = s.shape[-1], s.numel() // s.shape[-1]
    block = row_block(width)
    count, each = persistent_grid(rows, block, s.device)
    dx, parts = torch.empty_like(s), s.new_empty(1 if mean is None else 3, count, width, dtype=torch.float32)
    amax = s.new_empty(rows, dtype=torch.float32)
    stream: Any = grad_normed if grad_residual is None else grad_residual.contiguous()
    _norm_backward[(count,)](
        grad_normed, stream, s, scale, scale if mean is None else mean, weight, dx, parts, amax, rows, width,
        EACH=triton.cdiv(rows, count), HAS_STREAM=grad_residual is not None, IS_LAYER_NORM=mean is not None,
        BLOCK=block, num_warps=each,
    )  # fmt: skip
    dw, *rest = parts.sum(1).to(weight.dtype)
    db, sums = rest if rest else (None, None)
    return NormGradients(dx, dw, db, amax, sums)
