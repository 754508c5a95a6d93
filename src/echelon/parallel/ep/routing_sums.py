"""Sums over the tokens of a sequence, of routers whose ranks have parts of it: what a balance loss of it needs.

Ranks of cp have parts of a sequence, and so have ranks of tp under sequence parallelism; padding does not count. In
backward the ranks of cp have different parts of the loss, so gradients of the sums are summed over cp; the ranks of tp
have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp.tp_collectives import SequenceParallelBoundary, positions_per_rank

if TYPE_CHECKING:
    from echelon.parallel.cp.context_parallel import ContextParallel
    from echelon.parallel.transform_context import TransformContext


def apply_routing_sums(context: TransformContext) -> None:
    """Let a foreign model add up what its routers did with all tokens of a sequence."""
    model, boundary = context.model, context.tp_boundary
    if not isinstance(model, ForeignCausalLM) or model.router_loss is None:
        return
    divided = boundary if isinstance(boundary, SequenceParallelBoundary) else None
    if divided is not None or context.cp_context is not None:
        model.routing_sums = TokenSums(context.cp_context, divided)


class TokenSums:
    """The tokens of a sequence on this rank, and sums over those of all ranks."""

    def __init__(self, context: ContextParallel | None, boundary: SequenceParallelBoundary | None):
        self.context, self.boundary = context, boundary

    def is_token(self, device: torch.device) -> Tensor | None:
        if self.context is not None:
            inside = self.context.positions(device) < self.context.seq_len
        else:
            assert self.boundary is not None
            inside = torch.ones(self.boundary.length, dtype=torch.bool, device=device)
        if self.boundary is None:
            return inside
        axis = self.boundary.axis
        part = positions_per_rank(len(inside), axis)
        padded = torch.nn.functional.pad(inside, (0, part * axis.size - len(inside)))
        return padded[axis.index * part : (axis.index + 1) * part]

    def total(self, sums: Tensor) -> Tensor:
        cp = None if self.context is None else self.context.axis
        axes: list[MeshAxis] = [] if cp is None else [cp]
        axes += [] if self.boundary is None else [self.boundary.axis]

        def add(x: Tensor) -> Tensor:
            total = x.clone(memory_format=torch.contiguous_format)
            for axis in axes:
                axis.all_reduce(total)
            return total

        def add_gradients(dy: Tensor) -> Tensor:
            return dy if cp is None else cp.all_reduce(dy.clone(memory_format=torch.contiguous_format))

        return with_backward(sums, add, add_gradients)
