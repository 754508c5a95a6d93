"""Loads and stores of weights in their three formats, shared by the optimizer kernels, and their random bits.

The kernels at the end convert weights for optimizers that are not one kernel.

    low_ptr       given: float32 split into two halves (split_fp32.py)
    indices_ptr   given: a bfloat16 tensor is written, with stochastic rounding (stochastic_round.py)
    neither       float32

bfloat16 tensors are passed as int16, their bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.stochastic_round import ElementIndices

BLOCK = 1024
"""elements of a program: 8 per thread, one 16-byte load of a 16-bit dtype"""
WARPS = 4


@triton.jit
def float_bits(x):
    """Return the bits of float32 as int32, with every NaN replaced by the quiet one."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def element_offsets(size, BLOCK: tl.constexpr):
    """Return (the program's element offsets, their mask)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < size


@triton.jit
def random_bits(at, step_ptr, indices_ptr):
    """Return 32 random bits per element where something is rounded, else 0."""
    bits = 0
    if indices_ptr is not None:
        index = at + tl.load(indices_ptr)
        inner = tl.load(indices_ptr + 3)
        if inner > 0:
            rows, middle = index // inner, tl.load(indices_ptr + 2)
            index = (
                (rows // middle) * tl.load(indices_ptr + 4) + (rows % middle) * tl.load(indices_ptr + 5) + index % inner
            )
        seed = _hash32(tl.load(step_ptr).to(tl.uint32) ^ tl.load(indices_ptr + 1).to(tl.uint32))
        bits = _hash32((index + tl.load(indices_ptr + 6)).to(tl.uint32) ^ seed)
    return bits


@triton.jit
def load_fp32(ptr, at, mask):
    """Load as float32."""
    x = tl.load(ptr + at, mask=mask, other=0)
    if ptr.dtype.element_ty == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def store_rounded(ptr, at, mask, x, bits, SHIFT: tl.constexpr):
    """Store x; bfloat16 is rounded stochastically by 16 of the random bits."""
    if ptr.dtype.element_ty == tl.int16:
        x = ((float_bits(x) + ((bits >> SHIFT) & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16)
    tl.store(ptr + at, x, mask=mask)


@triton.jit
def load_weights(high_ptr, low_ptr, at, mask):
    w = load_fp32(high_ptr, at, mask)
    if low_ptr is not None:
        low = tl.load(low_ptr + at, mask=mask, other=0).to(tl.int32)
        w = (w.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    return w


@triton.jit
def store_weights(high_ptr, low_ptr, at, mask, w, bits):
    if low_ptr is not None:
        weight_bits = float_bits(w)
        upper = (weight_bits + 0x8000) >> 16
        tl.store(high_ptr + at, upper.to(tl.int16), mask=mask)
        tl.store(low_ptr + at, (weight_bits - (upper << 16)).to(tl.int16), mask=mask)
    else:
        if high_ptr.dtype.element_ty == tl.int16:
            bits = _hash32(bits ^ 0x9E3779B9)  # the first hash's bits round the moments
        store_rounded(high_ptr, at, mask, w, bits, 0)


def view_as_int16(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def rounding_indices(
    *written: Tensor | None, indices: ElementIndices | None, low: Tensor | None = None
) -> Tensor | None:
    """Return the `indices_ptr` tensor if a written tensor is rounded; the first, the weights, is not with `low`."""
    rounded = [tensor for tensor in written[low is not None :] if tensor is not None and tensor.dtype == torch.bfloat16]
    if not rounded:
        return None
    assert indices is not None
    return _indices_tensor(indices, rounded[0].device)


@cache
def _indices_tensor(indices: ElementIndices, device: torch.device) -> Tensor:
    """Cached: seven integer arguments would slow every launch down, and multiply the compiled variants."""
    return torch.tensor([indices.start, indices.key, *indices.sizes, *indices.strides, indices.base], device=device)


@triton.jit
def _halves_join(high_ptr, low_ptr, values_ptr, size, BLOCK: tl.constexpr):
    at, mask = element_offsets(size, BLOCK)
    tl.store(values_ptr + at, load_weights(high_ptr, low_ptr, at, mask), mask=mask)


@triton.jit
def _halves_write(values_ptr, high_ptr, low_ptr, step_ptr, indices_ptr, size, BLOCK: tl.constexpr):
    at, mask = element_offsets(size, BLOCK)
    values = tl.load(values_ptr + at, mask=mask, other=0.0)
    store_weights(high_ptr, low_ptr, at, mask, values, random_bits(at, step_ptr, indices_ptr))


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    high, low = high.contiguous(), low.contiguous()
    values = torch.empty_like(high, dtype=torch.float32)
    _halves_join[(triton.cdiv(high.numel(), BLOCK),)](
        view_as_int16(high), low, values, high.numel(), BLOCK=BLOCK, num_warps=WARPS
    )
    return values


def split_halves(values: Tensor, high: Tensor, low: Tensor) -> None:
    assert high.is_contiguous()
    assert low.is_contiguous()
    _write_halves(values, high, low, None, None)


def stochastic_round(values: Tensor, indices: ElementIndices, step: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, by the random bits of these elements in this step."""
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    _write_halves(values, rounded, None, step, indices)
    return rounded


def _write_halves(
    values: Tensor, high: Tensor, low: Tensor | None, step: Tensor | None, indices: ElementIndices | None
) -> None:
    _halves_write[(triton.cdiv(high.numel(), BLOCK),)](
        *(values.contiguous(), view_as_int16(high), low, step, rounding_indices(high, low=low, indices=indices)),
        high.numel(),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
