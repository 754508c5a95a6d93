"""Gradients of which each rank of an axis has only a part: to be summed over it once a step, when they are reduced."""

from __future__ import annotations

from echelon.layout.placement import Piece
from echelon.parallel.apply import ParallelModel
from echelon.parallel.comm.mesh_axis import MeshAxis, all_reduce_coalesced
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.sharded_model import ShardedModel

GradientPieces = list[tuple[ParamGroup, Piece]]
PiecesByAxis = list[tuple[MeshAxis, GradientPieces]]


def partial_gradients(parallel: ParallelModel) -> PiecesByAxis:
    """By axis, in one order on all ranks."""
    found: dict[str, list[tuple[ParamGroup, Piece]]] = {}
    for unit, piece in parallel.sharded_model.pieces():
        for name in piece.param.partial_grad_axes if piece.start < piece.stop else ():
            found.setdefault(name, []).append((unit, piece))
    return [(parallel.axes[name], held) for name, held in sorted(found.items())]


def all_reduce_pieces(axis: MeshAxis, pieces: GradientPieces) -> None:
    """Of those on the host, a sum is made on the device."""
    found = [ShardedModel.piece_view(unit.grad, piece) for unit, piece in pieces]
    here = [gradient.to(unit.unsharded_param.device) for gradient, (unit, _) in zip(found, pieces, strict=True)]
    all_reduce_coalesced(axis, here)
    for gradient, summed in zip(found, here, strict=True):
        if gradient is not summed:
            gradient.copy_(summed)
