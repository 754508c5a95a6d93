"""Sparse value kernels: a program processes a chunk of a row, and knows where the values of each block start.

[Note: the order of values]

A block has 32 bytes of bitmask, one for each thread of a warp: a thread loads and stores its eight elements at once.
Values of a block are ordered by their bit position: first those of bit 0 of each byte, then those of bit 1, and so on.
So neighbouring threads write neighbouring values, into few cache lines. In element order, each of a thread's eight
stores would touch as many lines as there are threads.

    byte 0: 1.1.....     bit 0: bytes 0, 2
         1: .11.....         1: byte 1
         2: 1.......         2: bytes 0, 1         values: 0.0  2.0  1.1  0.2  1.2  (byte.bit)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.activations.bitmask_triton import _bits_block_offsets, _bits_offsets
from echelon.kernels.activations.blockwise_cast import MIN_SCALE, BlockFormat, empty_scales
from echelon.kernels.activations.blockwise_cast_triton import _quantize_codes
from echelon.kernels.activations.sparse_values import SparseValues
from echelon.kernels.kernel_launch import launch
from echelon.kernels.tensor_spec import split_row


@triton.jit
def _sparse_offsets(bits_ptr, ends_ptr, byte_at, there, block, some, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """Return (offset of each element's value, which elements have one): [bytes, 8].

    All eight bit positions are counted at once, each in one byte of a 64-bit integer.
    """
    byte = tl.load(bits_ptr + byte_at, mask=there, other=0)
    # Isolate bit i in byte i, then shift it to the lowest bit of that byte.
    parts = (byte.to(tl.uint64) * 0x0101010101010101) & 0x8040201008040201
    parts = ((parts + 0x7F7F7F7F7F7F7F7F) >> 7) & 0x0101010101010101
    parts = tl.reshape(parts, (CHUNK // SIZE, SIZE // 8))
    upto = tl.cumsum(parts, axis=1)
    last = tl.full((CHUNK // SIZE, SIZE // 8), SIZE // 8 - 1, tl.int32)
    begin = (tl.gather(upto, last, axis=1) * 0x0101010101010101) << 8
    before = tl.reshape(upto - parts + begin, (CHUNK // 8,))
    start = tl.load(ends_ptr + block - 1, mask=some & (block > 0), other=0)
    start = tl.reshape(tl.broadcast_to(start[:, None], (CHUNK // SIZE, SIZE // 8)), (CHUNK // 8,))
    place = tl.arange(0, 8)[None, :]
    at = (before[:, None] >> (place * 8).to(tl.uint64)).to(tl.int32) & 0xFF
    return start[:, None] + at, ((byte[:, None].to(tl.int32) >> place) & 1) != 0


@triton.jit
def _sparse_compact(
    x_ptr, bits_ptr, ends_ptr, values_ptr, scales_ptr, row, chunks, blocks, max_value, smallest,
    NARROW: tl.constexpr, INT: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    block, some = _bits_block_offsets(chunks, blocks, CHUNK, SIZE)
    place, has = _sparse_offsets(bits_ptr, ends_ptr, byte, there, block, some, CHUNK, SIZE)
    if NARROW:
        wide = tl.reshape(x.to(tl.float32), (CHUNK // SIZE, SIZE))
        codes, scale = _quantize_codes(wide, max_value, smallest, INT, SCALED)
        codes = tl.reshape(codes.to(values_ptr.dtype.element_ty), (CHUNK // 8, 8))
        tl.store(values_ptr + place, codes, mask=has)
        if SCALED:
            tl.store(scales_ptr + block, scale, mask=some)
    else:
        tl.store(values_ptr + place, x, mask=has)


@triton.jit
def _sparse_expand(
    values_ptr, bits_ptr, ends_ptr, scales_ptr, out_ptr, row, chunks, blocks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    block, some = _bits_block_offsets(chunks, blocks, CHUNK, SIZE)
    place, has = _sparse_offsets(bits_ptr, ends_ptr, byte, there, block, some, CHUNK, SIZE)
    x = tl.load(values_ptr + place, mask=has, other=0.0)
    if SCALED:
        scale = tl.load(scales_ptr + block, mask=some, other=0.0)
        x = tl.reshape(tl.reshape(x.to(tl.float32), (CHUNK // SIZE, SIZE)) * scale[:, None], (CHUNK // 8, 8))
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def compact(x: Tensor, bits: Tensor, total: int, block_ends: Tensor, block_format: BlockFormat | None) -> SparseValues:
    rows, split = len(x), split_row(x.shape[1])
    scaled = block_format is not None and block_format.has_scales
    values = x.new_empty(total, dtype=x.dtype if block_format is None else block_format.dtype)
    scales = x.new_empty(rows, split.num_blocks, dtype=torch.float32) if scaled else empty_scales(x)
    numbers = (*split.numbers, block_format.max_value if block_format else 0.0, MIN_SCALE)
    narrow = {"NARROW": block_format is not None, "INT": values.dtype == torch.int8, "SCALED": scaled}
    tensors = (x, bits, block_ends, values, scales)
    launch(_sparse_compact, rows * split.num_chunks, *tensors, *numbers, **narrow, **split.constants)
    return SparseValues(values, scales, block_ends)


def expand(sparse: SparseValues, bits: Tensor, block_format: BlockFormat | None, out: Tensor) -> None:
    split, tensors = split_row(out.shape[1]), (sparse.values, bits, sparse.block_ends, sparse.scales, out)
    scaled = block_format is not None and block_format.has_scales
    launch(_sparse_expand, len(out) * split.num_chunks, *tensors, *split.numbers, SCALED=scaled, **split.constants)
