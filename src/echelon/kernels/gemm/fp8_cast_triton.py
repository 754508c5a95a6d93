"""cast.py's kernels: a program takes a tile, and writes it as it lies and transposed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.gemm.fp8_cast import pad_to_alignment

TRANSPOSE_TILE, ROW_TILE = (64, 128, 8), (16, 256, 4)
"""rows, columns and warps of a tile: where it is turned its rows are as long as possible, else its columns"""
BLOCK = 2048
ROWS_PER_PROGRAM, COLUMNS_PER_PROGRAM = 64, 1024
"""of a program that looks for the largest of columns"""


@triton.jit
def _clamp_to_range(x, most):
    """Into the range of the type. What is not a number stays so, else nobody would learn of it."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -most), most), x)


@triton.jit
def _cast_tile(
    x_ptr, plain_ptr, turned_ptr, by_row_ptr, by_column_ptr, rows, columns, row_stride,
    plain_stride, turned_stride, most,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, ONE_BY_ROW: tl.constexpr, ONE_BY_COLUMN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tiles cover the padding too, whose values are zero."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    if PLAIN:
        if ONE_BY_ROW:
            inverse = tl.load(by_row_ptr + row, mask=row < rows, other=1.0)
        else:
            inverse = tl.load(by_row_ptr)
        value = _clamp_to_range(x * (1.0 / inverse), most).to(plain_ptr.dtype.element_ty)
        tl.store(plain_ptr + row * plain_stride + column, value, mask=(row < rows) & (column < plain_stride))
    if TURNED:
        if ONE_BY_COLUMN:
            inverse = tl.load(by_column_ptr + column, mask=column < columns, other=1.0)
        else:
            inverse = tl.load(by_column_ptr)
        value = _clamp_to_range(x * (1.0 / inverse), most).to(turned_ptr.dtype.element_ty)
        at = turned_ptr + tl.trans(column) * turned_stride + tl.trans(row)
        tl.store(at, tl.trans(value), mask=tl.trans((row < turned_stride) & (column < columns)))


@triton.jit
def _cast_largest(x_ptr, largest_ptr, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_stride + column, mask=column < WIDTH, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    tl.store(largest_ptr + row, tl.max(largest, axis=0))


def _contiguous_rows(x: Tensor) -> Tensor:
    """Elements of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def row_amax(x: Tensor) -> Tensor:
    x = _contiguous_rows(x)
    out = x.new_empty(len(x), dtype=torch.float32)
    _cast_largest[(len(x),)](x, out, x.stride(0), WIDTH=x.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _cast_largest_of_columns(x_ptr, parts_ptr, rows, columns, row_stride, EACH: tl.constexpr, WIDTH: tl.constexpr):
    """The largest of EACH rows in every column: one row of the parts."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), dtype=tl.float32)
    for step in range(EACH):
        row = part * EACH + step
        x = tl.load(x_ptr + row * row_stride + column, mask=(column < columns) & (row < rows), other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    tl.store(parts_ptr + part * columns + column, largest, mask=column < columns)


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
    """x [rows, columns] in 8 bits as it lies where `by_row` is given, and transposed where `by_column` is."""
    x = _contiguous_rows(x)
    rows, columns = x.shape
    plain = x.new_empty(rows, pad_to_alignment(columns), dtype=dtype) if row_inverse is not None else None
    turned = x.new_empty(columns, pad_to_alignment(rows), dtype=dtype) if column_inverse is not None else None
    tile_rows, tile_columns, warps = ROW_TILE if turned is None else TRANSPOSE_TILE
    grid = (triton.cdiv(pad_to_alignment(rows), tile_rows), triton.cdiv(pad_to_alignment(columns), tile_columns))
    _cast_tile[grid](
        x, plain if plain is not None else x, turned if turned is not None else x,
        row_inverse if row_inverse is not None else x, column_inverse if column_inverse is not None else x,
        rows, columns, x.stride(0), pad_to_alignment(columns), pad_to_alignment(rows), torch.finfo(dtype).max,
        PLAIN=plain is not None, TURNED=turned is not None,
        ONE_BY_ROW=row_inverse is not None and row_inverse.numel() > 1,
        ONE_BY_COLUMN=column_inverse is not None and column_inverse.numel() > 1,
        TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns, num_warps=warps,
    )  # fmt: skip
    return plain, turned
