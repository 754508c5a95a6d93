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

from echelon.kernels.optim.fused_adamw import Place
from echelon.kernels.optim.weight_formats_triton import as_bits, drawn, place_for, read, read_weights, write_weights

ROWS, COLUMNS = 32, 128
WARPS = 4


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(its elements, which of them there are, its rows, its columns)"""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :], row, column


@triton.jit
def _sides(row_ptr, column_ptr, row, column, real_rows, real_columns):
    """(numbers of the tile's rows, of its columns); 0 of padding"""
    of_rows = tl.load(row_ptr + row, mask=row < real_rows, other=0.0)
    of_columns = tl.load(column_ptr + column, mask=column < real_columns, other=0.0)
    return of_rows[:, None], of_columns[None, :]


@triton.jit
def _put(
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
    at, inside, row, column = _tile(rows, columns, ROWS, COLUMNS)
    real = inside & (row < real_rows)[:, None] & (column < real_columns)[None, :]
    g = read(gradient_ptr, at, real) * tl.load(scale_ptr).to(tl.float32)
    _put(row_ptr, column_ptr, tl.sum(g * g, 1), tl.sum(g * g, 0), row, column, rows, columns, COLUMNS)
    w = read_weights(high_ptr, low_ptr, at, real)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(w * w, 1)))


@triton.jit
def _factored_size(
    gradient_ptr, scale_ptr, row_ptr, column_ptr, squares_ptr, rows, columns, real_rows, real_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, row, column = _tile(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _sides(row_ptr, column_ptr, row, column, real_rows, real_columns)
    towards = read(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32) * (of_rows * of_columns)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(towards * towards, 1)))


@triton.jit
def _factored_move(
    high_ptr, low_ptr, gradient_ptr, moment_ptr, scale_ptr, live_ptr, row_ptr, column_ptr, factor_ptr, step_ptr,
    place_ptr, rows, columns, real_rows, real_columns, decay, momentum, rest, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside, row, column = _tile(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _sides(row_ptr, column_ptr, row, column, real_rows, real_columns)
    towards = read(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32) * (of_rows * of_columns)
    towards = towards * tl.load(factor_ptr)
    if moment_ptr is not None:
        towards = tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum + towards * rest
        tl.store(moment_ptr + at, towards, mask=inside)
    w = read_weights(high_ptr, low_ptr, at, inside)
    write_weights(high_ptr, low_ptr, at, inside, w - towards - w * decay, drawn(at, step_ptr, place_ptr))


@triton.jit
def _factored_bounded(
    high_ptr, low_ptr, gradient_ptr, moment_ptr, scale_ptr, live_ptr, row_ptr, column_ptr, new_row_ptr, new_column_ptr,
    step_ptr, place_ptr, rows, columns, real_rows, real_columns, lr, decay, momentum, rest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, inside, row, column = _tile(rows, columns, ROWS, COLUMNS)
    of_rows, of_columns = _sides(row_ptr, column_ptr, row, column, real_rows, real_columns)
    g = read(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    v = tl.where(inside, tl.minimum(of_rows, of_columns) + g * g, 0.0)
    _put(new_row_ptr, new_column_ptr, tl.max(v, 1), tl.max(v, 0), row, column, rows, columns, COLUMNS)
    if tl.load(live_ptr) == 0:
        return
    towards = tl.where(v > 0, g / tl.sqrt_rn(v), 0.0)
    if moment_ptr is not None:
        towards = tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum + towards * rest
        tl.store(moment_ptr + at, towards, mask=inside)
    w = read_weights(high_ptr, low_ptr, at, inside)
    write_weights(high_ptr, low_ptr, at, inside, w - (towards + w * decay) * lr, drawn(at, step_ptr, place_ptr))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """A rectangle of a matrix, as it lies: weights, and the gradient that is multiplied by `scale`."""

    high: Tensor
    """the weights, or with `low` their upper halves; in bfloat16 alone they are rounded by `step` and `place`"""
    low: Tensor | None
    gradient: Tensor
    scale: Tensor
    step: Tensor | None
    place: Place | None
    sizes: tuple[int, int]
    real: tuple[int, int]
    """rows and columns that are no padding; they come first"""

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of squares of the gradient over rows and over columns, and of the weights."""
        sides, squares = self._sides(), self._room(*self._grid)
        _factored_sums[self._grid](
            as_bits(self.high), self.low, as_bits(self.gradient), self.scale, *sides, squares, **self._numbers
        )
        return *self._put_together(sides, "sum"), squares.sum()

    def size(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The sum of squares of the gradient times numbers of rows and of columns."""
        squares = self._room(*self._grid)
        _factored_size[self._grid](as_bits(self.gradient), self.scale, rows, columns, squares, **self._numbers)
        return squares.sum()

    def move(
        self,
        rows: Tensor,
        columns: Tensor,
        factor: Tensor,
        live: Tensor,
        *,
        decay: float,
        moment: Tensor | None,
        momentum: float,
    ) -> None:
        """Adafactor's weights move by what `size` has measured, times `factor`, where `live` is true."""
        _factored_move[self._grid](
            *self._written(moment, live), rows, columns, factor, *self._chance,
            decay=decay, momentum=momentum, rest=1 - momentum, **self._numbers,
        )  # fmt: skip

    def bounded(
        self,
        rows: Tensor,
        columns: Tensor,
        live: Tensor,
        *,
        lr: float,
        decay: float,
        moment: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """SM3's weights move where `live` is true; gives the new bounds of rows and of columns."""
        sides = self._sides()
        _factored_bounded[self._grid](
            *self._written(moment, live), rows, columns, *sides, *self._chance,
            lr=lr, decay=decay, momentum=momentum, rest=1 - momentum, **self._numbers,
        )  # fmt: skip
        return self._put_together(sides, "amax")

    def _written(self, moment: Tensor | None, live: Tensor) -> tuple[Tensor | None, ...]:
        return as_bits(self.high), self.low, as_bits(self.gradient), moment, self.scale, live

    @property
    def _chance(self) -> tuple[Tensor | None, Tensor | None]:
        return self.step, place_for(self.high, low=self.low, place=self.place)

    @property
    def _numbers(self) -> dict[str, int | bool]:
        sizes = dict(zip(("rows", "columns", "real_rows", "real_columns"), (*self.sizes, *self.real), strict=True))
        return {**sizes, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS, "enable_fp_fusion": False}

    @property
    def _tiles(self) -> tuple[int, int]:
        """(down, across)"""
        return triton.cdiv(self.sizes[0], ROWS), triton.cdiv(self.sizes[1], COLUMNS)

    @property
    def _grid(self) -> tuple[int]:
        down, across = self._tiles
        return (down * across,)

    def _room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.high.device)

    def _sides(self) -> tuple[Tensor, Tensor]:
        """Room for what tiles give for rows, and for columns."""
        down, across = self._tiles
        return self._room(across, self.sizes[0]), self._room(down, self.sizes[1])

    def _put_together(self, sides: tuple[Tensor, Tensor], how: str) -> tuple[Tensor, Tensor]:
        """By `sum` or `amax`, of real rows and columns."""
        of_rows, of_columns = (getattr(side, how)(0) for side in sides)
        return of_rows[: self.real[0]], of_columns[: self.real[1]]
