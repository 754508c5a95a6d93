"""Max-pool index kernels, elementwise in memory order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.activations.pool_indices import PoolWindow

BLOCK = 1024


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


def _sizes(x: Tensor, window: PoolWindow) -> tuple[int, ...]:
    inner = 1 if x.is_contiguous() else x.shape[1]
    return x.numel(), inner, x.shape[-2], x.shape[-1], window.width


def _constants(window: PoolWindow) -> dict[str, int]:
    pairs = {"STRIDE": window.stride, "PADDING": window.padding, "DILATION": window.dilation}
    constants = {f"{name}_{dim}": pair[dim] for name, pair in pairs.items() for dim in (0, 1)}
    return constants | {"KERNEL": window.kernel[1], "BLOCK": BLOCK}


def encode(indices: Tensor, window: PoolWindow, out: Tensor) -> None:
    grid = (triton.cdiv(indices.numel(), BLOCK),)
    _places_encode[grid](indices, out, *_sizes(indices, window), **_constants(window))


def decode(codes: Tensor, window: PoolWindow, out: Tensor) -> None:
    grid = (triton.cdiv(codes.numel(), BLOCK),)
    _places_decode[grid](codes, out, *_sizes(codes, window), **_constants(window))
