"""GELU kernels (tanh form): a program processes full rows; in backward it also adds up their columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import persistent_grid, row_block, warps_per_row

BETA = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
KAPPA = tl.constexpr(0.044715)


@triton.jit
def _gelu_forward(x_ptr, out_ptr, amax_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * BETA * (x + KAPPA * x * x * x)) + 1.0)
    out = (0.5 * x * (1.0 + tanh)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=mask)
    tl.store(amax_ptr + row, tl.max(tl.abs(out.to(tl.float32)), axis=0))


@triton.jit
def _gelu_backward(dout_ptr, x_ptr, dx_ptr, parts_ptr, amax_ptr, rows, width, EACH: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(EACH):
        row = (program + step * tl.num_programs(0)).to(tl.int64)
        mask = inside & (row < rows)
        at = row * width + column
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * BETA * (x + KAPPA * x * x * x)) + 1.0)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * BETA * (1.0 + 3.0 * KAPPA * x * x)
        dx = (dout * slope).to(dx_ptr.dtype.element_ty)
        wide = dx.to(tl.float32)
        sums += wide
        tl.store(dx_ptr + at, dx, mask=mask)
        tl.store(amax_ptr + row, tl.max(tl.abs(wide), axis=0), mask=row < rows)
    tl.store(parts_ptr + program.to(tl.int64) * width + column, sums, mask=inside)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (GELU of x, absolute maximum of each of its rows)."""
    x = x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out, amax = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    block = row_block(width)
    _gelu_forward[(rows,)](x, out, amax, width, BLOCK=block, num_warps=warps_per_row(block))
    return out, amax


def backward(dout: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gradient of x, absolute maximum of each of its rows, sum of its rows)."""
    dout, x = dout.contiguous(), x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    block = row_block(width)
    count, warps = persistent_grid(rows, block, x.device)
    dx, amax = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    parts = x.new_empty(count, width, dtype=torch.float32)
    _gelu_backward[(count,)](
        dout, x, dx, parts, amax, rows, width, EACH=triton.cdiv(rows, count), BLOCK=block, num_warps=warps
    )
    return dx, amax, parts.sum(0).to(x.dtype)
