"""FP8 cast kernels: a program reads a tile, and writes it and its transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.gemm.fp8_cast import pad_to_alignment

TRANSPOSE_TILE, ROW_TILE = (64, 128, 8), (16, 256, 4)
"""(rows, columns, warps) of a tile: taller where it is also transposed, so that both writes are long"""
BLOCK = 2048
ROWS_PER_PROGRAM, COLUMNS_PER_PROGRAM = 64, 1024
"""of a program of `column_amax`"""


@triton.jit
def _clamp_to_range(x, max_value):
    """Clamp to the dtype's range; NaN stays NaN."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -max_value), max_value), x)


@triton.jit
def _cast_tile(
    x_ptr, plain_ptr, transposed_ptr, row_inverse_ptr, column_inverse_ptr, rows, columns, row_stride,
    plain_stride, transposed_stride, max_value,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles cover the padding too, where they write zeros."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    if PLAIN:
        if PER_ROW:
            inverse = tl.load(row_inverse_ptr + row, mask=row < rows, other=1.0)
        else:
            inverse = tl.load(row_inverse_ptr)
        value = _clamp_to_range(x * (1.0 / inverse), max_value).to(plain_ptr.dtype.element_ty)
        tl.store(plain_ptr + row * plain_stride + column, value, mask=(row < rows) & (column < plain_stride))
    if TRANSPOSED:
        if PER_COLUMN:
            inverse = tl.load(column_inverse_ptr + column, mask=column < columns, other=1.0)
        else:
            inverse = tl.load(column_inverse_ptr)
        value = _clamp_to_range(x * (1.0 / inverse), max_value).to(transposed_ptr.dtype.element_ty)
        at = transposed_ptr + tl.trans(column) * transposed_stride + tl.trans(row)
        tl.store(at, tl.trans(value), mask=tl.trans((row < transposed_stride) & (column < columns)))


@triton.jit
def _cast_largest(x_ptr, amax_ptr, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_stride + column, mask=column < WIDTH, other=0.0)
        amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
    tl.store(amax_ptr + row, tl.max(amax, axis=0))


def _contiguous_rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous()


def row_amax(x: Tensor) -> Tensor:
    x = _contiguous_rows(x)
    out = x.new_empty(len(x), dtype=torch.float32)
    _cast_largest[(len(x),)](x, out, x.stride(0), WIDTH=x.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _cast_largest_of_columns(x_ptr, parts_ptr, rows, columns, row_stride, EACH: tl.constexpr, WIDTH: tl.constexpr):
    """Write the absolute maximum of EACH rows in every column: one row of the partial maxima."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    amax = tl.zeros((WIDTH,), dtype=tl.float32)
    for step in range(EACH):
        row = part * EACH + step
        x = tl.load(x_ptr + row * row_stride + column, mask=(column < columns) & (row < rows), other=0.0)
        amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
    tl.store(parts_ptr + part * columns + column, amax, mask=column < columns)


def column_amax(x: Tensor) -> Tensor:
    x = _contiguous_rows(x)
    rows, columns = x.shape
    parts = x.new_empty(triton.cdiv(rows, ROWS_PER_PROGRAM), columns, dtype=torch.float32)
    grid = (len(parts), triton.cdiv(columns, COLUMNS_PER_PROGRAM))
    _cast_largest_of_columns[grid](
        x, parts, rows, columns, x.stride(0), EACH=ROWS_PER_PROGRAM, WIDTH=COLUMNS_PER_PROGRAM, num_warps=4
    )
    return parts.amax(0)


def cast_to_fp8(
    x: Tensor, dtype: torch.dtype, row_inverse: Tensor | None, column_inverse: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Cast x [rows, columns] where `row_inverse` is given, and its transpose where `column_inverse` is."""
    x = _contiguous_rows(x)
    rows, columns = x.shape
    plain = x.new_empty(rows, pad_to_alignment(columns), dtype=dtype) if row_inverse is not None else None
    transposed = x.new_empty(columns, pad_to_alignment(rows), dtype=dtype) if column_inverse is not None else None
    tile_rows, tile_columns, warps = ROW_TILE if transposed is None else TRANSPOSE_TILE
    grid = (triton.cdiv(pad_to_alignment(rows), tile_rows), triton.cdiv(pad_to_alignment(columns), tile_columns))
    _cast_tile[grid](
        x, plain if plain is not None else x, transposed if transposed is not None else x,
        row_inverse if row_inverse is not None else x, column_inverse if column_inverse is not None else x,
        rows, columns, x.stride(0), pad_to_alignment(columns), pad_to_alignment(rows), torch.finfo(dtype).max,
        PLAIN=plain is not None, TRANSPOSED=transposed is not None,
        PER_ROW=row_inverse is not None and row_inverse.numel() > 1,
        PER_COLUMN=column_inverse is not None and column_inverse.numel() > 1,
        TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns, num_warps=warps,
    )  # fmt: skip
    return plain, transposed
