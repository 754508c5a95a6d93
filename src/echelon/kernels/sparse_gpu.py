"""sparse.py's kernels: a program takes a chunk of a row, and knows where the values of the chunk before it end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.bits_gpu import _bits_place
from echelon.kernels.blockwise import BLOCK, SMALLEST, Kind, blocks_of, no_scales
from echelon.kernels.blockwise_gpu import _blockwise_codes
from echelon.kernels.lying import chunk_of, chunks_of
from echelon.kernels.sparse import Values


@triton.jit
def _sparse_set(byte):
    """How many of a byte's bits are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@triton.jit
def _sparse_place(bits_ptr, ends_ptr, byte_at, there):
    """(where each element's value is, which elements have one), [bytes, 8]: sums over bytes, then inside each byte."""
    byte = tl.load(bits_ptr + byte_at, mask=there, other=0).to(tl.int32)
    count = _sparse_set(byte)
    program = tl.program_id(0)
    start = tl.load(ends_ptr + program - 1, mask=program > 0, other=0)
    place = tl.arange(0, 8)[None, :]
    before = (tl.cumsum(count, axis=0) - count)[:, None] + _sparse_set(byte[:, None] & ((1 << place) - 1))
    return start + before, ((byte[:, None] >> place) & 1) != 0


@triton.jit
def _sparse_compact(
    x_ptr, bits_ptr, ends_ptr, values_ptr, scales_ptr, row, chunks, blocks, most, smallest,
    NARROW: tl.constexpr, INT: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, inside, byte, there = _bits_place(row, chunks, CHUNK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    place, has = _sparse_place(bits_ptr, ends_ptr, byte, there)
    if NARROW:
        wide = tl.reshape(x.to(tl.float32), (CHUNK // SIZE, SIZE))
        codes, scale = _blockwise_codes(wide, most, smallest, INT, SCALED)
        codes = tl.reshape(codes.to(values_ptr.dtype.element_ty), (CHUNK // 8, 8))
        tl.store(values_ptr + place, codes, mask=has)
        if SCALED:
            to, some = _sparse_blocks(row, chunks, blocks, CHUNK, SIZE)
            tl.store(scales_ptr + to, scale, mask=some)
    else:
        tl.store(values_ptr + place, x, mask=has)


@triton.jit
def _sparse_blocks(row, chunks, blocks, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """(scales, which of them there are) of the program"""
    program = tl.program_id(0).to(tl.int64)
    block = program % chunks * (CHUNK // SIZE) + tl.arange(0, CHUNK // SIZE)
    return program // chunks * blocks + block, block < blocks


@triton.jit
def _sparse_expand(
    values_ptr, bits_ptr, ends_ptr, scales_ptr, out_ptr, row, chunks, blocks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at, inside, byte, there = _bits_place(row, chunks, CHUNK)
    place, has = _sparse_place(bits_ptr, ends_ptr, byte, there)
    x = tl.load(values_ptr + place, mask=has, other=0.0)
    if SCALED:
        to, some = _sparse_blocks(row, chunks, blocks, CHUNK, SIZE)
        scale = tl.load(scales_ptr + to, mask=some, other=0.0)
        x = tl.reshape(tl.reshape(x.to(tl.float32), (CHUNK // SIZE, SIZE)) * scale[:, None], (CHUNK // 8, 8))
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def compact(x: Tensor, bits: Tensor, total: int, ends: Tensor, kind: Kind | None) -> Values:
    rows, row = x.shape
    chunks, chunk = chunks_of(row), chunk_of(row)
    scaled = kind is not None and kind.scaled
    values = x.new_empty(total, dtype=x.dtype if kind is None else kind.dtype)
    scales = x.new_empty(rows, blocks_of(row), dtype=torch.float32) if scaled else no_scales(x)
    _sparse_compact[(rows * chunks,)](
        x, bits, ends, values, scales, row, chunks, blocks_of(row), kind.most if kind else 0.0, SMALLEST,
        NARROW=kind is not None, INT=values.dtype == torch.int8, SCALED=scaled,
        CHUNK=chunk, SIZE=min(BLOCK, chunk), num_warps=4,
    )  # fmt: skip
    return Values(values, scales, ends)


def expand(found: Values, bits: Tensor, kind: Kind | None, out: Tensor) -> None:
    rows, row = out.shape
    chunks, chunk = chunks_of(row), chunk_of(row)
    _sparse_expand[(rows * chunks,)](
        found.values, bits, found.ends, found.scales, out, row, chunks, blocks_of(row),
        SCALED=kind is not None and kind.scaled, CHUNK=chunk, SIZE=min(BLOCK, chunk), num_warps=4,
    )  # fmt: skip
