"""blockwise.py's kernels: a program takes a chunk of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.blockwise import BLOCK, SMALLEST, Kind, blocks_of, no_scales
from echelon.kernels.lying import chunk_of, chunks_of


@triton.jit
def _blockwise_codes(x, most, smallest, INT: tl.constexpr, SCALED: tl.constexpr):
    """(values in the range of the kind's type, scales [blocks]) of float32 [blocks, n]"""
    scale = tl.max(tl.abs(x), axis=1) / most
    # A maximum passes over what is not a number; its block must not look as if all were well.
    broken = tl.max((x != x).to(tl.int32), axis=1) > 0
    scale = tl.where(broken, float("nan"), tl.maximum(scale, smallest))
    if SCALED:
        x = x * (1.0 / scale)[:, None]
    if INT:
        x = tl.floor(x + 0.5)
    cut = tl.minimum(tl.maximum(x, -most), most)
    return tl.where(x == x, cut, 0.0 if INT else x), scale  # no integer says "not a number"; the scale does


@triton.jit
def _blockwise_place(row, chunks, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """(row's number, elements, which of them there are, blocks, which of them there are), in the row"""
    program = tl.program_id(0).to(tl.int64)
    line, start = program // chunks, program % chunks * CHUNK
    block = tl.arange(0, CHUNK // SIZE)
    at = start + block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    block = start // SIZE + block
    return line, at, at < row, block, block * SIZE < row


@triton.jit
def _blockwise_encode(
    x_ptr, codes_ptr, scales_ptr, row, chunks, blocks, most, smallest,
    INT: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    line, at, inside, block, there = _blockwise_place(row, chunks, CHUNK, SIZE)
    x = tl.load(x_ptr + line * row + at, mask=inside, other=0.0).to(tl.float32)
    codes, scale = _blockwise_codes(x, most, smallest, INT, SCALED)
    tl.store(codes_ptr + line * row + at, codes.to(codes_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(scales_ptr + line * blocks + block, scale, mask=there)


@triton.jit
def _blockwise_decode(
    codes_ptr, scales_ptr, out_ptr, row, chunks, blocks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    line, at, inside, block, there = _blockwise_place(row, chunks, CHUNK, SIZE)
    x = tl.load(codes_ptr + line * row + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scales_ptr + line * blocks + block, mask=there, other=0.0)[:, None]
    tl.store(out_ptr + line * row + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def encode(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    rows, row = x.shape
    chunks, chunk = chunks_of(row), chunk_of(row)
    codes = x.new_empty(rows, row, dtype=kind.dtype)
    scales = x.new_empty(rows, blocks_of(row), dtype=torch.float32) if kind.scaled else no_scales(x)
    _blockwise_encode[(rows * chunks,)](
        x, codes, scales, row, chunks, blocks_of(row), kind.most, SMALLEST,
        INT=kind.dtype == torch.int8, SCALED=kind.scaled, CHUNK=chunk, SIZE=min(BLOCK, chunk), num_warps=4,
    )  # fmt: skip
    return codes, scales


def decode(codes: Tensor, scales: Tensor, kind: Kind, out: Tensor) -> None:
    rows, row = out.shape
    chunks, chunk = chunks_of(row), chunk_of(row)
    _blockwise_decode[(rows * chunks,)](
        codes, scales, out, row, chunks, blocks_of(row),
        SCALED=kind.scaled, CHUNK=chunk, SIZE=min(BLOCK, chunk), num_warps=4,
    )  # fmt: skip
