"""Kernels of rules that keep numbers of rows and columns (optim/rules/adafactor.py, optim/rules/sm3.py): a program takes a tile.

What a tile gives for its rows and columns is written side by side with what others give, and put together after: no
two programs add to one place, so every run adds in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.fused_adamw import ElementIndices
from echelon.kernels.optim.weight_formats_triton import (
    load_fp32,
    load_weights,
    random_bits,
    rounding_indices,
    store_weights,
    view_as_int16,
)

ROWS, COLUMNS = 32, 128
WARPS = 4


@triton.jit
def _tile_offsets(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(its elements, which of them there are, its rows, its columns)"""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :], row, column


@triton.jit
def _load_row_column(row_ptr, column_ptr, row, column, real_rows, real_columns):
    """(numbers of the tile's rows, of its columns); 0 of padding"""
    of_rows = tl.load(row_ptr + row, mask=row < real_rows, other=0.0)
    of_columns = tl.load(column_ptr + column, mask=column < real_columns, other=0.0)
    return of_rows[:, None], of_columns[None, :]


@triton.jit
def _store_partials(
    row_ptr, column_ptr, of_rows, of_columns, row, column, rows, columns, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the tile gives: [columns / COLUMNS, rows] and [rows / ROWS, columns]"""
    across = tl.cdiv(columns, COLUMNS)
    tl.store(row_ptr + (tl.program_id(0) % across) * rows + row, of_rows, mask=row < rows)
    tl.store(column_ptr + (tl.program_id(0) // across) * columns + column, of_columns, mask=column < columns)


@triton.jit
def _factored_sums(
    high_ptr, low_ptr, gradient_ptr, scale_ptr, row_ptr, column_ptr, squares_ptr, rows, columns, real_rows,
    real_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    real = inside & (row < real_rows)[:, None] & (column < real_columns)[None, :]
    g = load_fp32(gradient_ptr, at, real) * tl.load(scale_ptr).to(tl.float32)
    _store_partials(row_ptr, column_ptr, tl.sum(g * g, 1), tl.sum(g * g, 0), row, column, rows, columns, COLUMNS)
    w = load_weights(high_ptr, low_ptr, at, real)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(w * w, 1)))


@triton.jit
def _factored_size(
    gradient_ptr, scale_ptr, row_ptr, column_ptr, squares_ptr, rows, columns, real_rows, real_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _load_row_column(row_ptr, column_ptr, row, column, real_rows, real_columns)
    towards = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32) * (of_rows * of_columns)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(towards * towards, 1)))


@triton.jit
def _factored_adafactor(
    high_ptr, low_ptr, gradient_ptr, moment_ptr, scale_ptr, live_ptr, row_ptr, column_ptr, factor_ptr, step_ptr,
    place_ptr, rows, columns, real_rows, real_columns, decay, momentum, rest, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _load_row_column(row_ptr, column_ptr, row, column, real_rows, real_columns)
    towards = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32) * (of_rows * of_columns)
    towards = towards * tl.load(factor_ptr)
    if moment_ptr is not None:
        towards = tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum + towards * rest
        tl.store(moment_ptr + at, towards, mask=inside)
    w = load_weights(high_ptr, low_ptr, at, inside)
    store_weights(high_ptr, low_ptr, at, inside, w - towards - w * decay, random_bits(at, step_ptr, place_ptr))


@triton.jit
def _factored_sm3(
    high_ptr, low_ptr, gradient_ptr, moment_ptr, scale_ptr, live_ptr, row_ptr, column_ptr, new_row_ptr, new_column_ptr,
    step_ptr, place_ptr, rows, columns, real_rows, real_columns, lr, decay, momentum, rest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _load_row_column(row_ptr, column_ptr, row, column, real_rows, real_columns)
    g = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    v = tl.where(inside, tl.minimum(of_rows, of_columns) + g * g, 0.0)
    _store_partials(new_row_ptr, new_column_ptr, tl.max(v, 1), tl.max(v, 0), row, column, rows, columns, COLUMNS)
    if tl.load(live_ptr) == 0:
        return
    towards = tl.where(v > 0, g / tl.sqrt_rn(v), 0.0)
    if moment_ptr is not None:
        towards = tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum + towards * rest
        tl.store(moment_ptr + at, towards, mask=inside)
    w = load_weights(high_ptr, low_ptr, at, inside)
    store_weights(high_ptr, low_ptr, at, inside, w - (towards + w * decay) * lr, random_bits(at, step_ptr, place_ptr))


@dataclass(frozen=True, kw_only=True)
class MatrixTiles:
    """A rectangle of a matrix, as it lies: weights, and the gradient that is multiplied by `scale`."""

    high: Tensor
    """the weights, or with `low` their upper halves; in bfloat16 alone they are rounded by `step` and `place`"""
    low: Tensor | None
    gradient: Tensor
    grad_scale: Tensor
    step: Tensor | None
    indices: ElementIndices | None
    shape: tuple[int, int]
    unpadded: tuple[int, int]
    """rows and columns that are no padding; they come first"""

    def gradient_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of squares of the gradient over rows and over columns, and of the weights."""
        sides, squares = self._empty_partials(), self._empty(*self._grid)
        _factored_sums[self._grid](
            view_as_int16(self.high),
            self.low,
            view_as_int16(self.gradient),
            self.grad_scale,
            *sides,
            squares,
            **self._launch_args,
        )
        return *self._reduce_partials(sides, "sum"), squares.sum()

    def update_sum_squares(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The sum of squares of the gradient times numbers of rows and of columns."""
        squares = self._empty(*self._grid)
        _factored_size[self._grid](
            view_as_int16(self.gradient), self.grad_scale, rows, columns, squares, **self._launch_args
        )
        return squares.sum()

    def adafactor_update(
        self,
        rows: Tensor,
        columns: Tensor,
        factor: Tensor,
        do_update: Tensor,
        *,
        decay: float,
        moment: Tensor | None,
        momentum: float,
    ) -> None:
        """Adafactor's weights move by what `size` has measured, times `factor`, where `live` is true."""
        _factored_adafactor[self._grid](
            *self._update_args(moment, do_update), rows, columns, factor, *self._rounding_args,
            decay=decay, momentum=momentum, rest=1 - momentum, **self._launch_args,
        )  # fmt: skip

    def sm3_update(
        self,
        rows: Tensor,
        columns: Tensor,
        do_update: Tensor,
        *,
        lr: float,
        decay: float,
        moment: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """SM3's weights move where `live` is true; gives the new bounds of rows and of columns."""
        sides = self._empty_partials()
        _factored_sm3[self._grid](
            *self._update_args(moment, do_update), rows, columns, *sides, *self._rounding_args,
            lr=lr, decay=decay, momentum=momentum, rest=1 - momentum, **self._launch_args,
        )  # fmt: skip
        return self._reduce_partials(sides, "amax")

    def _update_args(self, moment: Tensor | None, do_update: Tensor) -> tuple[Tensor | None, ...]:
        return view_as_int16(self.high), self.low, view_as_int16(self.gradient), moment, self.grad_scale, do_update

    @property
    def _rounding_args(self) -> tuple[Tensor | None, Tensor | None]:
        return self.step, rounding_indices(self.high, low=self.low, indices=self.indices)

    @property
    def _launch_args(self) -> dict[str, int | bool]:
        sizes = dict(zip(("rows", "columns", "real_rows", "real_columns"), (*self.shape, *self.unpadded), strict=True))
        return {**sizes, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS, "enable_fp_fusion": False}

    @property
    def _num_tiles(self) -> tuple[int, int]:
        """(down, across)"""
        return triton.cdiv(self.shape[0], ROWS), triton.cdiv(self.shape[1], COLUMNS)

    @property
    def _grid(self) -> tuple[int]:
        down, across = self._num_tiles
        return (down * across,)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.high.device)

    def _empty_partials(self) -> tuple[Tensor, Tensor]:
        """Room for what tiles give for rows, and for columns."""
        down, across = self._num_tiles
        return self._empty(across, self.shape[0]), self._empty(down, self.shape[1])

    def _reduce_partials(self, sides: tuple[Tensor, Tensor], how: str) -> tuple[Tensor, Tensor]:
        """By `sum` or `amax`, of real rows and columns."""
        of_rows, of_columns = (getattr(side, how)(0) for side in sides)
        return of_rows[: self.unpadded[0]], of_columns[: self.unpadded[1]]
