"""Blockwise cast kernels: a program processes a chunk of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.activations.blockwise_cast import MIN_SCALE, BlockFormat, empty_scales
from echelon.kernels.kernel_launch import launch
from echelon.kernels.tensor_spec import split_row


@triton.jit
def _quantize_codes(x, max_value, smallest, INT: tl.constexpr, SCALED: tl.constexpr):
    """Return (values in the format's range, scales [blocks]) of float32 [blocks, n]."""
    scale = tl.full((x.shape[0],), 1.0, tl.float32)
    if SCALED:
        # As integers, the bits of absolute values sort like the values, with NaN above all, which a float maximum
        # would ignore. A block with NaN or infinity gets a NaN scale.
        amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        scale = tl.maximum(amax_bits.to(tl.float32, bitcast=True) / max_value, smallest)
        scale = tl.where(amax_bits < 0x7F800000, scale, float("nan"))
        x = x * (1.0 / scale)[:, None]
    else:
        x = tl.clamp(x, -max_value, max_value, propagate_nan=tl.PropagateNan.ALL)
    if INT:
        # Adding 1.5 * 2 ** 23 rounds to the nearest integer, which is then in the lowest bits.
        x = (x + 12582912.0).to(tl.int32, bitcast=True)
    return x, scale


@triton.jit
def _blockwise_offsets(row, chunks, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """Return (row index, element offsets, their mask, block indices, their mask), within the row."""
    program = tl.program_id(0)
    row_index, start = (program // chunks).to(tl.int64), program % chunks * CHUNK
    block = tl.arange(0, CHUNK // SIZE)
    at = start + block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    block = start // SIZE + block
    return row_index, at, at < row, block, block * SIZE < row


@triton.jit
def _blockwise_encode(
    x_ptr, codes_ptr, scales_ptr, row, chunks, blocks, max_value, smallest,
    INT: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row_index, at, inside, block, there = _blockwise_offsets(row, chunks, CHUNK, SIZE)
    x = tl.load(x_ptr + row_index * row + at, mask=inside, other=0.0).to(tl.float32)
    codes, scale = _quantize_codes(x, max_value, smallest, INT, SCALED)
    tl.store(codes_ptr + row_index * row + at, codes.to(codes_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scales_ptr + row_index * blocks + block, scale, mask=there)


@triton.jit
def _blockwise_decode(
    codes_ptr, scales_ptr, out_ptr, row, chunks, blocks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row_index, at, inside, block, there = _blockwise_offsets(row, chunks, CHUNK, SIZE)
    x = tl.load(codes_ptr + row_index * row + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scales_ptr + row_index * blocks + block, mask=there, other=0.0)[:, None]
    tl.store(out_ptr + row_index * row + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def encode(x: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    rows, split, scaled = len(x), split_row(x.shape[1]), block_format.has_scales
    codes = x.new_empty(x.shape, dtype=block_format.dtype)
    scales = x.new_empty(rows, split.num_blocks, dtype=torch.float32) if scaled else empty_scales(x)
    tensors, numbers = (x, codes, scales), (*split.numbers, block_format.max_value, MIN_SCALE)
    kinds = {"INT": block_format.dtype == torch.int8, "SCALED": scaled}
    launch(_blockwise_encode, rows * split.num_chunks, *tensors, *numbers, **kinds, **split.constants)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, block_format: BlockFormat, out: Tensor) -> None:
    split, tensors, scaled = split_row(out.shape[1]), (codes, scales, out), block_format.has_scales
    launch(_blockwise_decode, len(out) * split.num_chunks, *tensors, *split.numbers, SCALED=scaled, **split.constants)
