"""GELU kernels (tanh form): forward by rows; backward by tiles, whose columns it adds up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import row_block, warps_per_row

TILE_ROWS, TILE_COLUMNS = 8, 256
"""elements that a program of backward loads at a time: 16 of each thread"""
MAX_PROGRAMS = 4096
"""of backward; more would write more partial sums"""
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
def _gelu_backward(
    dout_ptr, x_ptr, dx_ptr, parts_ptr, rows, width, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A program goes through some of the rows tile by tile, and adds the tiles up: their columns once, at the end."""
    program = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(EACH):
        row = (program + step * tl.num_programs(1)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
        # With tanh = 1 - 2 r, (1 + tanh) / 2 is 1 - r and (1 - tanh^2) / 2 is 2 r (1 - r).
        r = 1.0 / (tl.exp(2.0 * BETA * (x + KAPPA * x * x * x)) + 1.0)
        slope = (1.0 - r) * (1.0 + 2.0 * r * x * BETA * (1.0 + 3.0 * KAPPA * x * x))
        dx = (dout * slope).to(dx_ptr.dtype.element_ty)
        sums += dx.to(tl.float32)
        tl.store(dx_ptr + at, dx, mask=mask)
    tl.store(parts_ptr + program.to(tl.int64) * width + column, tl.sum(sums, axis=0), mask=inside)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (GELU of x, absolute maximum of each of its rows)."""
    x = x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out, amax = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    block = row_block(width)
    _gelu_forward[(rows,)](x, out, amax, width, BLOCK=block, num_warps=warps_per_row(block))
    return out, amax


def backward(dout: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient of x, sum of its rows)."""
    dout, x = dout.contiguous(), x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    tiles, columns = triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS)
    count = max(min(tiles, MAX_PROGRAMS // columns), 1)
    dx, parts = torch.empty_like(x), x.new_empty(count, width, dtype=torch.float32)
    _gelu_backward[columns, count](
        dout, x, dx, parts, rows, width, EACH=triton.cdiv(tiles, count), ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return dx, parts.sum(0).to(x.dtype)
