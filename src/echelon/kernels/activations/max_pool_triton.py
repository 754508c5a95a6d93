"""Max-pool kernels: a program processes outputs in memory order; pooling, eight channels at once in channels-last."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.activations.max_pool import PoolWindow
from echelon.kernels.kernel_launch import launch

GROUPS = 256
"""of a program that pools, each of eight channels or one"""
BLOCK = 1024
"""indices of a program that converts them"""


@triton.jit
def _pool_offsets(size, inner, down, across, height, width, DOWN: tl.constexpr, ACROSS: tl.constexpr,
                GROUPS: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Return (output offsets, their mask, offset of the first input of each window): [groups, EACH]."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    each = inner // EACH
    window = group // each  # one division per group
    line = window // across
    image = line // down
    first = (image * height + (line - image * down) * DOWN) * width + (window - line * across) * ACROSS
    first = first * inner + (group - window * each) * EACH
    lane = tl.arange(0, EACH)[None, :]
    at = group[:, None] * EACH + lane
    return at, at < size, first[:, None] + lane


@triton.jit
def _pool_maximum(x_ptr, out_ptr, codes_ptr, size, inner, down, across, height, width,
                  DOWN: tl.constexpr, ACROSS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    at, inside, first = _pool_offsets(size, inner, down, across, height, width, DOWN, ACROSS, GROUPS, EACH)
    best = tl.load(x_ptr + first, mask=inside, other=0.0)
    code = tl.zeros((GROUPS, EACH), tl.int32)
    for place in tl.static_range(1, DOWN * ACROSS):
        step = (place // ACROSS * width + place % ACROSS) * inner
        x = tl.load(x_ptr + first + step, mask=inside, other=0.0)
        # The first of equal values, and the last NaN, as in torch.
        better = (x > best) | (x != x)
        best, code = tl.where(better, x, best), tl.where(better, place, code)
    tl.store(out_ptr + at, best, mask=inside)
    tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside)


@triton.jit
def _pool_backward(gradient_ptr, codes_ptr, out_ptr, size, inner, down, across, height, width,
                 DOWN: tl.constexpr, ACROSS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    at, inside, first = _pool_offsets(size, inner, down, across, height, width, DOWN, ACROSS, GROUPS, EACH)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    for place in tl.static_range(DOWN * ACROSS):
        step = (place // ACROSS * width + place % ACROSS) * inner
        tl.store(out_ptr + first + step, tl.where(code == place, gradient, 0.0), mask=inside)


def _launch(kernel: Any, image: Tensor, pooled: Tensor, window: PoolWindow, *tensors: Tensor) -> None:
    inner = 1 if image.is_contiguous() else image.shape[1]
    each = 8 if inner % 8 == 0 else 1
    numbers = (pooled.numel(), inner, *pooled.shape[2:], *image.shape[2:])
    down, across = window.kernel
    programs = triton.cdiv(pooled.numel(), GROUPS * each)
    launch(kernel, programs, *tensors, *numbers, DOWN=down, ACROSS=across, GROUPS=GROUPS, EACH=each)


def max_pool(x: Tensor, window: PoolWindow, out: Tensor, codes: Tensor) -> None:
    _launch(_pool_maximum, x, out, window, x, out, codes)


def scatter_gradient(gradient: Tensor, codes: Tensor, window: PoolWindow, out: Tensor) -> None:
    """Write the gradient of every element inside a window."""
    _launch(_pool_backward, out, gradient, window, gradient, codes, out)


@triton.jit
def _places_origins(at, inner, down, across, stride_0, stride_1, padding_0, padding_1):
    """Return the row and column where each window starts."""
    window = at // inner
    return window // across % down * stride_0 - padding_0, window % across * stride_1 - padding_1


@triton.jit
def _places_encode(
    indices_ptr, codes_ptr, size, inner, down, across, width,
    STRIDE_0: tl.constexpr, STRIDE_1: tl.constexpr, PADDING_0: tl.constexpr, PADDING_1: tl.constexpr,
    DILATION_0: tl.constexpr, DILATION_1: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = _places_origins(at, inner, down, across, STRIDE_0, STRIDE_1, PADDING_0, PADDING_1)
    index = tl.load(indices_ptr + at, mask=at < size, other=0).to(tl.int32)
    code = (index // width - row) // DILATION_0 * KERNEL + (index % width - column) // DILATION_1
    tl.store(codes_ptr + at, code.to(tl.uint8), mask=at < size)


@triton.jit
def _places_decode(
    codes_ptr, indices_ptr, size, inner, down, across, width,
    STRIDE_0: tl.constexpr, STRIDE_1: tl.constexpr, PADDING_0: tl.constexpr, PADDING_1: tl.constexpr,
    DILATION_0: tl.constexpr, DILATION_1: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = _places_origins(at, inner, down, across, STRIDE_0, STRIDE_1, PADDING_0, PADDING_1)
    code = tl.load(codes_ptr + at, mask=at < size, other=0).to(tl.int32)
    index = (row + code // KERNEL * DILATION_0) * width + column + code % KERNEL * DILATION_1
    tl.store(indices_ptr + at, index.to(tl.int64), mask=at < size)


def _convert(kernel: Any, x: Tensor, window: PoolWindow, out: Tensor) -> None:
    sizes = (x.numel(), 1 if x.is_contiguous() else x.shape[1], x.shape[-2], x.shape[-1], window.width)
    pairs = {"STRIDE": window.stride, "PADDING": window.padding, "DILATION": window.dilation}
    constants = {f"{name}_{dim}": pair[dim] for name, pair in pairs.items() for dim in (0, 1)}
    grid = (triton.cdiv(x.numel(), BLOCK),)
    kernel[grid](x, out, *sizes, **constants, KERNEL=window.kernel[1], BLOCK=BLOCK)


def encode(indices: Tensor, window: PoolWindow, out: Tensor) -> None:
    _convert(_places_encode, indices, window, out)


def decode(codes: Tensor, window: PoolWindow, out: Tensor) -> None:
    _convert(_places_decode, codes, window, out)
