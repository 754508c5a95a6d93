"""Gradients of which each rank of an axis has only a part: to be summed over it once a step, when they are reduced."""

from __future__ import annotations

from echelon.layout.placement import Piece
from echelon.parallel.apply import Parallel
from echelon.parallel.comm.mesh_axis import Axis, sum_together
from echelon.parallel.dp.param_group import FlatUnit
from echelon.parallel.dp.sharded_model import Flat

Held = list[tuple[FlatUnit, Piece]]
Partial = list[tuple[Axis, Held]]


def partial_gradients(parallel: Parallel) -> Partial:
    """By axis, in one order on all ranks."""
    found: dict[str, list[tuple[FlatUnit, Piece]]] = {}
    for unit, piece in parallel.flat.pieces():
        for name in piece.entry.sum_over if piece.start < piece.stop else ():
            found.setdefault(name, []).append((unit, piece))
    return [(parallel.axes[name], held) for name, held in sorted(found.items())]


def sum_held(axis: Axis, held: Held) -> None:
    """Of those on the host, a sum is made on the device."""
    found = [Flat.view(unit.grad, piece) for unit, piece in held]
    here = [gradient.to(unit.full.device) for gradient, (unit, _) in zip(found, held, strict=True)]
    sum_together(axis, here)
    for gradient, summed in zip(found, here, strict=True):
        if gradient is not summed:
            gradient.copy_(summed)
