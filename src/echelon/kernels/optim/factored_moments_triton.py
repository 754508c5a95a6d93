"""Kernels of optimizers with row and column statistics (optim/rules/adafactor.py, sm3.py): a program processes a tile.

Each tile writes its partial row and column statistics to its own place, and torch reduces them afterwards: no atomics,
so every run adds in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.stochastic_round import ElementIndices
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
    """Return (element offsets, their mask, rows, columns) of the tile."""
    tile_columns = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // tile_columns) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tile_columns) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :], row, column


@triton.jit
def _load_row_column(row_ptr, column_ptr, row, column, unpadded_rows, unpadded_columns):
    """Load the statistics of the tile's rows and columns; 0 for padding."""
    row_stats = tl.load(row_ptr + row, mask=row < unpadded_rows, other=0.0)
    column_stats = tl.load(column_ptr + column, mask=column < unpadded_columns, other=0.0)
    return row_stats[:, None], column_stats[None, :]


@triton.jit
def _store_partials(
    row_ptr, column_ptr, row_stats, column_stats, row, column, rows, columns, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the tile's partial statistics: [columns / COLUMNS, rows] and [rows / ROWS, columns]."""
    tile_columns = tl.cdiv(columns, COLUMNS)
    tl.store(row_ptr + (tl.program_id(0) % tile_columns) * rows + row, row_stats, mask=row < rows)
    tl.store(column_ptr + (tl.program_id(0) // tile_columns) * columns + column, column_stats, mask=column < columns)


@triton.jit
def _factored_sums(
    high_ptr, low_ptr, gradient_ptr, scale_ptr, row_ptr, column_ptr, squares_ptr, rows, columns, unpadded_rows,
    unpadded_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, mask, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    unpadded = mask & (row < unpadded_rows)[:, None] & (column < unpadded_columns)[None, :]
    g = load_fp32(gradient_ptr, at, unpadded) * tl.load(scale_ptr).to(tl.float32)
    _store_partials(row_ptr, column_ptr, tl.sum(g * g, 1), tl.sum(g * g, 0), row, column, rows, columns, COLUMNS)
    w = load_weights(high_ptr, low_ptr, at, unpadded)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(w * w, 1)))


@triton.jit
def _factored_size(
    gradient_ptr, scale_ptr, row_ptr, column_ptr, squares_ptr, rows, columns, unpadded_rows, unpadded_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, mask, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    row_stats, column_stats = _load_row_column(row_ptr, column_ptr, row, column, unpadded_rows, unpadded_columns)
    direction = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32) * (row_stats * column_stats)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.sum(direction * direction, 1)))


@triton.jit
def _factored_adafactor(
    high_ptr, low_ptr, gradient_ptr, momentum_ptr, scale_ptr, do_update_ptr, row_ptr, column_ptr, factor_ptr, step_ptr,
    indices_ptr, rows, columns, unpadded_rows, unpadded_columns, decay, momentum, rest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.load(do_update_ptr) == 0:
        return
    at, mask, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    row_stats, column_stats = _load_row_column(row_ptr, column_ptr, row, column, unpadded_rows, unpadded_columns)
    direction = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32) * (row_stats * column_stats)
    direction = direction * tl.load(factor_ptr)
    if momentum_ptr is not None:
        direction = tl.load(momentum_ptr + at, mask=mask, other=0.0) * momentum + direction * rest
        tl.store(momentum_ptr + at, direction, mask=mask)
    w = load_weights(high_ptr, low_ptr, at, mask)
    store_weights(high_ptr, low_ptr, at, mask, w - direction - w * decay, random_bits(at, step_ptr, indices_ptr))


@triton.jit
def _factored_sm3(
    high_ptr, low_ptr, gradient_ptr, momentum_ptr, scale_ptr, do_update_ptr, row_ptr, column_ptr,
    new_row_ptr, new_column_ptr,
    step_ptr, indices_ptr, rows, columns, unpadded_rows, unpadded_columns, lr, decay, momentum, rest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at, mask, row, column = _tile_offsets(rows, columns, ROWS, COLUMNS)
    row_stats, column_stats = _load_row_column(row_ptr, column_ptr, row, column, unpadded_rows, unpadded_columns)
    g = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32)
    v = tl.where(mask, tl.minimum(row_stats, column_stats) + g * g, 0.0)
    _store_partials(new_row_ptr, new_column_ptr, tl.max(v, 1), tl.max(v, 0), row, column, rows, columns, COLUMNS)
    if tl.load(do_update_ptr) == 0:
        return
    direction = tl.where(v > 0, g / tl.sqrt_rn(v), 0.0)
    if momentum_ptr is not None:
        direction = tl.load(momentum_ptr + at, mask=mask, other=0.0) * momentum + direction * rest
        tl.store(momentum_ptr + at, direction, mask=mask)
    w = load_weights(high_ptr, low_ptr, at, mask)
    store_weights(high_ptr, low_ptr, at, mask, w - (direction + w * decay) * lr, random_bits(at, step_ptr, indices_ptr))


@dataclass(frozen=True, kw_only=True)
class MatrixTiles:
    """A rectangle of a matrix: its weights, and its gradient, which kernels multiply by `grad_scale`."""

    high: Tensor
    """the weights, or with `low` their upper halves; bfloat16 alone is rounded by `step` and `indices`"""
    low: Tensor | None
    gradient: Tensor
    grad_scale: Tensor
    step: Tensor | None
    indices: ElementIndices | None
    shape: tuple[int, int]
    unpadded: tuple[int, int]
    """rows and columns without padding; these come first"""

    def gradient_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of squares of the gradient over rows and over columns, and of the weights."""
        partials, squares = self._empty_partials(), self._empty(*self._grid)
        weights = (view_as_int16(self.high), self.low)
        _factored_sums[self._grid](
            *weights, view_as_int16(self.gradient), self.grad_scale, *partials, squares, **self._launch_args
        )
        return *self._reduce_partials(partials, "sum"), squares.sum()

    def update_sum_squares(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the sum of squares of the gradient times row and column factors."""
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
        """Apply Adafactor's update, gradient times row and column factors times `factor`, where `do_update` is true."""
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
        """Apply SM3's update where `do_update` is true; return the new row and column bounds."""
        partials = self._empty_partials()
        _factored_sm3[self._grid](
            *self._update_args(moment, do_update), rows, columns, *partials, *self._rounding_args,
            lr=lr, decay=decay, momentum=momentum, rest=1 - momentum, **self._launch_args,
        )  # fmt: skip
        return self._reduce_partials(partials, "amax")

    def _update_args(self, moment: Tensor | None, do_update: Tensor) -> tuple[Tensor | None, ...]:
        return view_as_int16(self.high), self.low, view_as_int16(self.gradient), moment, self.grad_scale, do_update

    @property
    def _rounding_args(self) -> tuple[Tensor | None, Tensor | None]:
        return self.step, rounding_indices(self.high, low=self.low, indices=self.indices)

    @property
    def _launch_args(self) -> dict[str, int | bool]:
        names = ("rows", "columns", "unpadded_rows", "unpadded_columns")
        sizes = dict(zip(names, (*self.shape, *self.unpadded), strict=True))
        return {**sizes, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS, "enable_fp_fusion": False}

    @property
    def _num_tiles(self) -> tuple[int, int]:
        """(vertical, horizontal)"""
        return triton.cdiv(self.shape[0], ROWS), triton.cdiv(self.shape[1], COLUMNS)

    @property
    def _grid(self) -> tuple[int]:
        tile_rows, tile_columns = self._num_tiles
        return (tile_rows * tile_columns,)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.high.device)

    def _empty_partials(self) -> tuple[Tensor, Tensor]:
        """Allocate the partial statistics of rows and of columns."""
        tile_rows, tile_columns = self._num_tiles
        return self._empty(tile_columns, self.shape[0]), self._empty(tile_rows, self.shape[1])

    def _reduce_partials(self, partials: tuple[Tensor, Tensor], reduction: str) -> tuple[Tensor, Tensor]:
        """Reduce partial statistics by `sum` or `amax`, without padding."""
        row_stats, column_stats = (getattr(partial, reduction)(0) for partial in partials)
        return row_stats[: self.unpadded[0]], column_stats[: self.unpadded[1]]
