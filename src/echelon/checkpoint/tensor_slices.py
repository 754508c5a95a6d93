"""Boxes of a logical tensor: what a rank holds of it, and what two of them share. No torch.

[Note: a run is a few boxes]

A rank holds a run [start, stop) of the elements of its local tensor, laid row by row (layout/placement.py), whose real
elements are a box of the logical tensor. A run of rows is the end of one row, some whole rows and the start of another:

    . . . a a        in two dimensions at most three boxes, in n at most 2n - 1,
    b b b b b        each of which lies in memory without gaps, one after another
    b b b b b
    c c . . .

Where the local tensor is padded, the padding is cut off each box. What is left goes to disk, dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.layout.placement import Piece

Ranges = tuple[tuple[int, int], ...]
"""a half-open range for each dimension"""


@dataclass(frozen=True)
class Part:
    """What is held of a logical tensor: a run of a local tensor that covers a box of it, perhaps with padding."""

    local: tuple[int, ...]
    """shape of the local tensor, padding included"""
    box: Ranges
    """of the logical tensor, without padding"""
    start: int
    stop: int

    @classmethod
    def of(cls, piece: Piece) -> Part:
        return cls(piece.entry.local_shape, piece.box, piece.start, piece.stop)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        return cls.all_of(tuple((0, size) for size in shape))

    @classmethod
    def all_of(cls, box: Ranges) -> Part:
        """A box without padding."""
        shape = extent(box)
        return cls(shape, box, 0, math.prod(shape))

    @property
    def padded(self) -> bool:
        return extent(self.box) != self.local

    def placed(self) -> list[Placed]:
        """Its boxes, in the order in which they lie."""
        strides = strides_of(self.local)
        found = []
        for low, sizes in _boxes(self.local, self.start, self.stop):
            ranges = []
            for first, size, (begin, end) in zip(low, sizes, self.box, strict=True):
                ranges.append((min(begin + first, end), min(begin + first + size, end)))
            box = tuple(ranges)
            if numel(box):
                offset = sum(first * stride for first, stride in zip(low, strides, strict=True)) - self.start
                found.append(Placed(box, offset, strides))
        return found


@dataclass(frozen=True)
class Placed:
    """A box of a logical tensor, and where it lies in a run."""

    box: Ranges
    offset: int
    """of its first element"""
    strides: tuple[int, ...]
    """in elements"""

    def within(self, box: Ranges) -> Placed:
        """A box inside it."""
        steps = zip(box, self.box, self.strides, strict=True)
        return Placed(box, self.offset + sum((a[0] - b[0]) * stride for a, b, stride in steps), self.strides)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(first indices, sizes) of boxes that cover a run of a row-major tensor, in its order."""
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
        yield from (((first, *low), (1, *size)) for low, size in _boxes(rest, begin, end))
        return
    if begin:
        yield from (((first, *low), (1, *size)) for low, size in _boxes(rest, begin, inner))
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if end:
        yield from (((last, *low), (1, *size)) for low, size in _boxes(rest, 0, end))


def extent(box: Ranges) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def numel(box: Ranges) -> int:
    return math.prod(extent(box))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a dense row-major tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))


def common(a: Ranges, b: Ranges) -> Ranges | None:
    """What two boxes share; none where that is nothing."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(low < high for low, high in found) else None


@dataclass(frozen=True)
class Rows:
    """A box inside a tensor, as rows that lie without gaps: so many elements from each of these places."""

    length: int
    starts: tuple[int, ...]


def rows_of(box: Ranges, around: Ranges) -> Rows:
    """The rows of a box in a dense row-major tensor that covers the box `around`."""
    outer, strides = extent(around), strides_of(extent(around))
    sizes, split = extent(box), len(box)
    while split and sizes[split - 1] == outer[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    length = math.prod(sizes[split:])
    starts = [
        sum((b[0] - a[0]) * stride for b, a, stride in zip(box[split:], around[split:], strides[split:], strict=True))
    ]
    for dim in range(split - 1, -1, -1):
        first = box[dim][0] - around[dim][0]
        starts = [at + (first + index) * strides[dim] for index in range(sizes[dim]) for at in starts]
    return Rows(length, tuple(starts))
