"""sparse.py's kernels: a program takes a chunk of a row, and knows where the values of the chunk before it end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.blockwise import BLOCK, SMALLEST, Kind, blocks_of, no_scales
from echelon.kernels.blockwise_gpu import _blockwise_codes, _blockwise_place
from echelon.kernels.lying import chunk_of, chunks_of
from echelon.kernels.sparse import Values


@triton.jit
def _sparse_places(bits_ptr, ends_ptr, line, at, inside, row, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """(where each element's value is, which elements have one), [blocks, SIZE]"""
    byte = tl.load(bits_ptr + line * ((row + 7) // 8) + (at >> 3), mask=inside, other=0).to(tl.int32)
    has = tl.reshape((byte >> (at & 7).to(tl.int32)) & 1, (CHUNK,))
    program = tl.program_id(0)
    start = tl.load(ends_ptr + program - 1, mask=program > 0, other=0)
    place = tl.reshape(start + tl.cumsum(has, axis=0) - has, (CHUNK // SIZE, SIZE))
    return place, tl.reshape(has, (CHUNK // SIZE, SIZE)) != 0


@triton.jit
def _sparse_compact(
    x_ptr, bits_ptr, ends_ptr, values_ptr, scales_ptr, row, chunks, blocks, most, smallest,
    NARROW: tl.constexpr, INT: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    line, at, inside, block, there = _blockwise_place(row, chunks, CHUNK, SIZE)
    x = tl.load(x_ptr + line * row + at, mask=inside, other=0.0)
    place, has = _sparse_places(bits_ptr, ends_ptr, line, at, inside, row, CHUNK, SIZE)
    if NARROW:
        codes, scale = _blockwise_codes(x.to(tl.float32), most, smallest, INT, SCALED)
        tl.store(values_ptr + place, codes.to(values_ptr.dtype.element_ty), mask=has)
        if SCALED:
            tl.store(scales_ptr + line * blocks + block, scale, mask=there)
    else:
        tl.store(values_ptr + place, x, mask=has)


@triton.jit
def _sparse_expand(
    values_ptr, bits_ptr, ends_ptr, scales_ptr, out_ptr, row, chunks, blocks,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    line, at, inside, block, there = _blockwise_place(row, chunks, CHUNK, SIZE)
    place, has = _sparse_places(bits_ptr, ends_ptr, line, at, inside, row, CHUNK, SIZE)
    x = tl.load(values_ptr + place, mask=has, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * tl.load(scales_ptr + line * blocks + block, mask=there, other=0.0)[:, None]
    tl.store(out_ptr + line * row + at, x.to(out_ptr.dtype.element_ty), mask=inside)


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
