"""A parameter as a stack of matrices, and the rectangles of them that a rank holds. No torch.

[Note: rectangles]

A 2-d parameter is a matrix; with more dims it is a stack of matrices of its last two dims (experts); a convolution
filter has a row for each output channel; a vector is a row. A rank holds a box of them (tensor and expert parallelism),
padded to equal boxes, in row-major order, and an interval [start, stop) of its elements (data parallelism):

    box, 4 x 5, the last column is padding     a rank's elements: [3, 17)
    . . . a a        a  the end of a row       1 x 2
    b b b b b        b  full rows              2 x 5, of which 2 x 4 are not padding
    b b b b b
    c c . . .        c  the start of a row     1 x 2

So a rank holds at most three rectangles of a matrix, each contiguous in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.layout.placement import LogicalParam, Piece


@dataclass(frozen=True)
class MatrixStack:
    """The shape of a stack of matrices."""

    num_matrices: int
    rows: int
    columns: int

    @property
    def is_factored(self) -> bool:
        """Whether one statistic per row and column is smaller than one per element."""
        return self.rows > 1 and self.columns > 1

    @property
    def num_row_column_stats(self) -> int:
        """Number of rows and columns of all matrices."""
        return self.num_matrices * (self.rows + self.columns)


def matrix_stack(shape: Sequence[int], *, filters: bool = False) -> MatrixStack:
    if len(shape) < 2:
        return MatrixStack(1, 1, math.prod(shape))
    if filters:
        return MatrixStack(1, shape[0], math.prod(shape[1:]))
    return MatrixStack(math.prod(shape[:-2]), shape[-2], shape[-1])


def local_matrix_stack(entry: LogicalParam) -> MatrixStack:
    """Return the full matrices of which a rank may hold elements: without other ranks' experts."""
    full = matrix_stack(entry.shape, filters=entry.is_conv)
    return MatrixStack(matrix_stack(entry.local_shape, filters=entry.is_conv).num_matrices, full.rows, full.columns)


@dataclass(frozen=True)
class MatrixRectangle:
    """A part of one matrix that is contiguous in memory."""

    start: int
    """first element, relative to the piece"""
    shape: tuple[int, int]
    """with padding"""
    matrix_index: int
    """in the stack, relative to the rank's box"""
    rows: tuple[int, int]
    """(start, stop) in the full matrix, without padding; empty where all is padding"""
    columns: tuple[int, int]

    @property
    def elements(self) -> slice:
        """Its elements, relative to the piece."""
        return slice(self.start, self.start + self.shape[0] * self.shape[1])

    @property
    def unpadded(self) -> tuple[slice, slice]:
        """Slices of the rectangle without its padding."""
        return slice(0, self.rows[1] - self.rows[0]), slice(0, self.columns[1] - self.columns[0])


def shard_rectangles(piece: Piece, max_numel: int) -> Iterator[MatrixRectangle]:
    """Yield a piece's rectangles in memory order, of about `max_numel` elements at most."""
    entry = piece.param
    local = matrix_stack(entry.local_shape, filters=entry.is_conv)
    box = _row_column_box(piece)
    position = piece.start
    while position < piece.stop:
        matrix, inside = divmod(position, local.rows * local.columns)
        row, column = divmod(inside, local.columns)
        left = piece.stop - position
        if column or left < local.columns:
            size = min(local.columns - column, left, max_numel)
            shape = (1, size)
        else:
            num_rows = min(local.rows - row, left // local.columns, max(1, max_numel // local.columns))
            shape = (num_rows, local.columns)
        rows, columns = _clip_to_box(row, shape[0], box[0]), _clip_to_box(column, shape[1], box[1])
        yield MatrixRectangle(position - piece.start, shape, matrix, rows, columns)
        position += shape[0] * shape[1]


def _row_column_box(piece: Piece) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (rows, columns) of the matrices that the rank's box covers."""
    entry, box = piece.param, piece.box
    if len(entry.shape) < 2:
        return (0, 1), (box[0] if box else (0, 1))
    if entry.is_conv:
        assert all(cut.dim < 2 for cut in entry.splits), "of convolution filters, channels alone are split"
        per_channel = math.prod(entry.shape[2:])
        return box[0], (box[1][0] * per_channel, box[1][1] * per_channel)
    # Of a stack, only the first dim is split, into equal parts: matrices are not.
    assert all(high - low == size for (low, high), size in zip(box[:-2], entry.local_shape, strict=False))
    assert all(cut.dim in (0, len(entry.shape) - 1, len(entry.shape) - 2) for cut in entry.splits)
    return box[-2], box[-1]


def _clip_to_box(first: int, count: int, box: tuple[int, int]) -> tuple[int, int]:
    low, high = box
    return min(low + first, high), min(low + first + count, high)
