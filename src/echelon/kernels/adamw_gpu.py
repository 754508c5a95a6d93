"""adamw.py's kernel: a program takes a block of elements. bfloat16 is read and written as its bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.adamw import Place

BLOCK = 1024
"""elements of a program: 8 of each thread's, one load of 16 bytes in 16 bits"""
WARPS = 4


@triton.jit
def _float(bits):
    """float32 of bfloat16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    """int32 of float32, every NaN the quiet one."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))


@triton.jit
def _hashed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["decayed", "start", "key", "middle", "inner", "outer_stride", "row_stride", "base"])
def _adamw(
    high_ptr, low_ptr, mean_ptr, square_ptr, gradient_ptr, numbers_ptr, step_ptr, size, decayed,
    start, key, middle, inner, outer_stride, row_stride, base,
    SPLIT: tl.constexpr, ROUNDED: tl.constexpr, SHORT_MOMENTS: tl.constexpr, SHORT_GRADIENT: tl.constexpr,
    BOX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers_ptr + 9) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    high = tl.load(high_ptr + at, mask=inside, other=0)
    mean = tl.load(mean_ptr + at, mask=inside, other=0)
    square = tl.load(square_ptr + at, mask=inside, other=0)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0)
    w = high
    if SPLIT:
        low = tl.load(low_ptr + at, mask=inside, other=0)
        w = ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    if ROUNDED:
        w = _float(high)
    if SHORT_MOMENTS:
        mean, square = _float(mean), _float(square)
    if SHORT_GRADIENT:
        gradient = _float(gradient)
    gradient = gradient.to(tl.float32)

    g = gradient * tl.load(numbers_ptr + 8)
    m = mean * tl.load(numbers_ptr + 0) + g * tl.load(numbers_ptr + 1)
    v = square * tl.load(numbers_ptr + 2) + g * g * tl.load(numbers_ptr + 3)
    w = w * tl.where(at < decayed, tl.load(numbers_ptr + 7), 1.0)
    below = tl.sqrt_rn(v) * tl.load(numbers_ptr + 6) + tl.load(numbers_ptr + 4)
    w = w - tl.div_rn(m * tl.load(numbers_ptr + 5), below)

    if ROUNDED or SHORT_MOMENTS:
        place = at + start
        if BOX:
            rows = place // inner
            place = (rows // middle) * outer_stride + (rows % middle) * row_stride + place % inner
        turned = _hashed(tl.load(step_ptr).to(tl.uint32) ^ key.to(tl.uint32))
        chance = _hashed((place + base).to(tl.uint32) ^ turned)
    if SPLIT:
        bits = _bits(w)
        upper = (bits + 0x8000) >> 16
        tl.store(high_ptr + at, upper.to(tl.int16), mask=inside)
        tl.store(low_ptr + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    elif ROUNDED:
        second = _hashed(chance ^ 0x9E3779B9)
        tl.store(high_ptr + at, ((_bits(w) + (second & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(high_ptr + at, w, mask=inside)
    if SHORT_MOMENTS:
        tl.store(mean_ptr + at, ((_bits(m) + (chance & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16), mask=inside)
        tl.store(square_ptr + at, ((_bits(v) + (chance >> 16).to(tl.int32)) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(mean_ptr + at, m, mask=inside)
        tl.store(square_ptr + at, v, mask=inside)


def update(
    high: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    *,
    decayed: int,
    place: Place,
) -> None:
    """As in adamw.py, for arithmetic in float32."""
    high, mean, square, gradient = (_as_bits(tensor) for tensor in (high, mean, square, gradient))
    _adamw[(triton.cdiv(len(high), BLOCK),)](
        high, high if low is None else low, mean, square, gradient, numbers, step, len(high), decayed,
        place.start, place.key, *place.sizes, *place.strides, place.base,
        SPLIT=low is not None, ROUNDED=low is None and high.dtype == torch.int16,
        SHORT_MOMENTS=mean.dtype == torch.int16, SHORT_GRADIENT=gradient.dtype == torch.int16,
        BOX=place.sizes[1] > 0, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
