"""SwiGLU kernels: a program processes one row, block by block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""elements of a row that a program loads at a time"""
WARPS = 8


@triton.jit
def _swiglu_forward(both_ptr, out_ptr, amax_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < WIDTH
        gate = tl.load(both_ptr + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        # Rounded where the plain path rounds: after silu.
        silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
        out = (silu * up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * WIDTH + column, out, mask=mask)
        amax = tl.maximum(amax, tl.abs(out.to(tl.float32)))
    tl.store(amax_ptr + row, tl.max(amax, axis=0))


@triton.jit
def _swiglu_backward(
    dout_ptr, both_ptr, dboth_ptr, out_ptr, amax_ptr, WIDTH: tl.constexpr, OUTPUT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < WIDTH
        at = row * 2 * WIDTH + column
        gate = tl.load(both_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        dup = (dout * silu).to(dboth_ptr.dtype.element_ty)
        dgate = (dout * up * (sigmoid + silu * (1.0 - sigmoid))).to(dboth_ptr.dtype.element_ty)
        tl.store(dboth_ptr + at, dgate, mask=mask)
        tl.store(dboth_ptr + at + WIDTH, dup, mask=mask)
        if OUTPUT:
            rounded = silu.to(out_ptr.dtype.element_ty).to(tl.float32)
            tl.store(out_ptr + row * WIDTH + column, (rounded * up).to(out_ptr.dtype.element_ty), mask=mask)
        amax = tl.maximum(amax, tl.maximum(tl.abs(dup.to(tl.float32)), tl.abs(dgate.to(tl.float32))))
    tl.store(amax_ptr + row, tl.max(amax, axis=0))


def forward(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (silu(gate) * up, absolute maximum of each row)."""
    gate_up = gate_up.contiguous()
    width, rows = gate_up.shape[-1] // 2, gate_up.numel() // gate_up.shape[-1]
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    amax = gate_up.new_empty(rows, dtype=torch.float32)
    _swiglu_forward[(rows,)](gate_up, out, amax, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return out, amax


def backward(dout: Tensor, gate_up: Tensor, *, output: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gradient of gate_up, absolute maximum of each of its rows, and with `output` the forward output)."""
    dout, gate_up = dout.contiguous(), gate_up.contiguous()
    width, rows = gate_up.shape[-1] // 2, gate_up.numel() // gate_up.shape[-1]
    dboth, amax = torch.empty_like(gate_up), gate_up.new_empty(rows, dtype=torch.float32)
    out = torch.empty_like(dout) if output else dout
    _swiglu_backward[(rows,)](dout, gate_up, dboth, out, amax, WIDTH=width, OUTPUT=output, BLOCK=BLOCK, num_warps=WARPS)
    return dboth, amax, out
