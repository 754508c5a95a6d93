"""All-reduce of gradients that are partial sums on the ranks of tp, or on the two stages of a tied embedding."""

from __future__ import annotations

from echelon.layout.placement import Piece
from echelon.parallel.comm.mesh_axis import all_reduce_coalesced
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.parallel.parallel_model import ParallelModel


class PartialGradients:
    """Gradients of which each rank of an axis holds one summand: all-reduced over it once per step.

    Norms and routers between tensor-parallel regions, and an embedding that is tied over the first and last pipeline
    stage (Megatron's allreduce_layernorm_grads and allreduce_embedding_grads).
    """

    def __init__(self, parallel: ParallelModel):
        by_axis: dict[str, list[tuple[ParamGroup, Piece]]] = {}
        for group, piece in parallel.sharded_model.pieces():
            for name in piece.param.partial_grad_axes if piece.start < piece.stop else ():
                by_axis.setdefault(name, []).append((group, piece))
        # In one order on all ranks.
        self._by_axis = [(parallel.axes[name], pieces) for name, pieces in sorted(by_axis.items())]

    def all_reduce(self, only: ParamGroup | None = None) -> None:
        """All-reduce in place, of all parameter groups or one. Gradients on the host travel over the device."""
        for axis, pieces in self._by_axis:
            chosen = [(group, piece) for group, piece in pieces if only is None or group is only]
            grads = [ShardedModel.piece_view(group.grad, piece) for group, piece in chosen]
            on_device = [grad.to(group.unsharded_param.device) for grad, (group, _) in zip(grads, chosen, strict=True)]
            all_reduce_coalesced(axis, on_device)
            for grad, reduced in zip(grads, on_device, strict=True):
                if grad is not reduced:
                    grad.copy_(reduced)
