"""Gradients of which each rank of an axis has only a part: to be summed over it once a step, when they are reduced."""

from __future__ import annotations

from echelon.layout.placement import Piece
from echelon.parallel.apply import Parallel
from echelon.parallel.axis import Axis
from echelon.parallel.flat_unit import FlatUnit

Partial = list[tuple[Axis, list[tuple[FlatUnit, Piece]]]]


def partial_gradients(parallel: Parallel) -> Partial:
    """By axis, in one order on all ranks."""
    found: dict[str, list[tuple[FlatUnit, Piece]]] = {}
    for unit, piece in parallel.flat.pieces():
        for name in piece.entry.sum_over if piece.start < piece.stop else ():
            found.setdefault(name, []).append((unit, piece))
    return [(parallel.axes[name], held) for name, held in sorted(found.items())]
