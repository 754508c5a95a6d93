"""Slices of a logical tensor as boxes: what a rank holds, and the intersections of boxes. No torch.

[Note: a run is a few boxes]

A rank holds a run [start, stop) of the row-major elements of its local tensor (layout/placement.py), whose real
elements are a box of the logical tensor. A run of rows is the end of one row, some full rows and the start of another:

    . . . a a        in two dimensions at most three boxes, in n at most 2n - 1,
    b b b b b        each of which is contiguous in memory, one after another
    b b b b b
    c c . . .

Padding of the local tensor is removed from each box. The rest goes to disk, dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.layout.placement import Piece

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""a half-open range for each dimension"""


@dataclass(frozen=True)
class LocalSlice:
    """A rank's slice of a logical tensor: a run of a local tensor that covers a box of it, perhaps with padding."""

    local_shape: tuple[int, ...]
    """shape of the local tensor, including padding"""
    box: Box
    """of the logical tensor, without padding"""
    start: int
    stop: int

    @classmethod
    def from_piece(cls, piece: Piece) -> LocalSlice:
        return cls(piece.param.local_shape, piece.box, piece.start, piece.stop)

    @classmethod
    def full(cls, shape: Sequence[int]) -> LocalSlice:
        return cls.from_box(tuple((0, size) for size in shape))

    @classmethod
    def from_box(cls, box: Box) -> LocalSlice:
        """A box without padding."""
        shape = box_shape(box)
        return cls(shape, box, 0, math.prod(shape))

    @property
    def is_padded(self) -> bool:
        return box_shape(self.box) != self.local_shape

    def boxes(self) -> list[PlacedBox]:
        """The boxes of the run, in memory order."""
        strides = row_major_strides(self.local_shape)
        placed = []
        for low, sizes in _cover_with_boxes(self.local_shape, self.start, self.stop):
            box = tuple(
                (min(begin + first, end), min(begin + first + size, end))
                for first, size, (begin, end) in zip(low, sizes, self.box, strict=True)
            )
            if numel(box):
                offset = sum(first * stride for first, stride in zip(low, strides, strict=True)) - self.start
                placed.append(PlacedBox(box, offset, strides))
        return placed


@dataclass(frozen=True)
class PlacedBox:
    """A box of a logical tensor, and its offset and strides in a run."""

    box: Box
    offset: int
    """of its first element"""
    strides: tuple[int, ...]
    """in elements"""

    def sub_box(self, box: Box) -> PlacedBox:
        """The part of it that a smaller box covers."""
        steps = zip(box, self.box, self.strides, strict=True)
        return PlacedBox(box, self.offset + sum((a[0] - b[0]) * stride for a, b, stride in steps), self.strides)


def _cover_with_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """(first indices, sizes) of the boxes that cover a run of a row-major tensor, in memory order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    first, begin = divmod(start, inner)
    last, end = divmod(stop, inner)
    if first == last:
        yield from (((first, *low), (1, *size)) for low, size in _cover_with_boxes(rest, begin, end))
        return
    if begin:
        yield from (((first, *low), (1, *size)) for low, size in _cover_with_boxes(rest, begin, inner))
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if end:
        yield from (((last, *low), (1, *size)) for low, size in _cover_with_boxes(rest, 0, end))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def numel(box: Box) -> int:
    return math.prod(box_shape(box))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None where it is empty."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(low < high for low, high in shared) else None


@dataclass(frozen=True)
class ContiguousRows:
    """A box inside a tensor, as contiguous rows: `length` elements from each of the starts."""

    length: int
    starts: tuple[int, ...]


def contiguous_rows(box: Box, outer: Box) -> ContiguousRows:
    """The contiguous rows of a box in a dense row-major tensor that covers the box `outer`."""
    outer_sizes, strides = box_shape(outer), row_major_strides(box_shape(outer))
    sizes, split = box_shape(box), len(box)
    while split and sizes[split - 1] == outer_sizes[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    length = math.prod(sizes[split:])
    starts = [
        sum((b[0] - a[0]) * stride for b, a, stride in zip(box[split:], outer[split:], strides[split:], strict=True))
    ]
    for dim in range(split - 1, -1, -1):
        first = box[dim][0] - outer[dim][0]
        starts = [at + (first + index) * strides[dim] for index in range(sizes[dim]) for at in starts]
    return ContiguousRows(length, tuple(starts))
