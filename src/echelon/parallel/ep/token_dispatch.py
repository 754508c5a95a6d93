"""`AllToAllTokenDispatcher`: dispatches tokens to experts on other ranks, and gathers scores for the gate.

[Note: how tokens are dispatched]

Every rank first all-gathers its token counts per expert, which the host waits for. All ranks then choose the same:

    some rank would receive more tokens than its limit     chunks (chunked_dispatch.py)
    a layout with ep_inner                                 two levels (hierarchical_all_to_all.py)
    otherwise                                              dispatch, experts, combine (token_all_to_all.py)

A rank that receives no token issues the same collectives as the others.

[Note: full sequences]

A gate routes full sequences. Their scores are all-gathered over the ranks that hold parts of them (cp, and tp under
sequence parallelism), in the sequence's order, without padding. Each of these ranks then computes the same routing, and
keeps what concerns its own tokens. In backward the ranks of cp have different parts of a loss, so gradients of scores
are summed over cp; the ranks of tp have the same, so each keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.layout import Layout
from echelon.moe.moe_layer import MoELayer
from echelon.moe.routing import Routing
from echelon.moe.token_permutation import TokenPermutation
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.cp.context_parallel import ContextParallel
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.ep.chunked_dispatch import DispatchChunks, max_received_tokens, num_chunks, run_in_chunks
from echelon.parallel.ep.cost import EP_ETP_AXIS, MAX_LOAD_FACTOR
from echelon.parallel.ep.hierarchical_all_to_all import HierarchicalAllToAll
from echelon.parallel.ep.token_all_to_all import TokenAllToAll
from echelon.parallel.tp.tp_collectives import RegionBoundary
from echelon.rng import RandomDraws


class AllToAllTokenDispatcher:
    """One rank's access to all experts, and to the other parts of its sequences."""

    def __init__(
        self,
        layout: Layout,
        axes: MeshAxes,
        boundary: RegionBoundary | None,
        context: ContextParallel | None,
        *,
        experts: int,
    ):
        self.axis, self.etp = axes.get_or_add(EP_ETP_AXIS), layout.etp
        self.hierarchical: HierarchicalAllToAll | None = None
        if layout.ep_inner > 1:
            inter_node = axes.get_or_add(f"{EP_ETP_AXIS}%{layout.ep_inner}")
            intra_node = axes.get_or_add(f"{EP_ETP_AXIS}/{layout.ep_inner}")
            self.hierarchical = HierarchicalAllToAll(inter_node, intra_node, etp=layout.etp, experts=experts)
        self.max_load_factor = MAX_LOAD_FACTOR
        self.tp, self.cp = axes["tp"], axes["cp"] if context is not None else None
        self.boundary, self.context = boundary, context

    # -- full sequences -----------------------------------------------------------------------------------------------

    def route(self, moe: MoELayer, x: Tensor) -> Routing:
        gate = moe.gate
        if self.tp.size == 1 and self.cp is None:
            local_routing: Routing = gate(x)
            return local_routing
        placement = self._positions(x)
        local, length = placement.positions[self.sequence_shard_index], placement.length
        for module in (*gate.modules(), moe.experts.drop):
            if isinstance(module, RandomDraws):
                module.window = {**module.window, 1: (local, length)}
        routing: Routing = gate(x, lambda scores: gate.route(_GatherScores.apply(scores, self, placement)))
        rows = torch.arange(len(x), device=x.device).unsqueeze(1) * length
        return routing.select_tokens(torch.where(local < length, rows + local, len(x) * length).flatten())

    @property
    def sequence_shard_index(self) -> int:
        """This rank's index among the ranks that hold parts of its sequences."""
        return (self.cp.index if self.cp is not None else 0) * self.tp.size + self.tp.index

    def _positions(self, x: Tensor) -> TokenPositions:
        local = x.shape[1]
        if self.context is None:
            length = self.boundary.length if self.boundary is not None else local
            return _contiguous_positions(self.tp.size, local, length, x.device)
        return _zigzag_positions(self.context.order, self.tp.size, local, x.device)

    # -- experts ------------------------------------------------------------------------------------------------------

    def dispatch(self, moe: MoELayer, x: Tensor, routing: Routing) -> Callable[[], Tensor]:
        if self.axis.size == 1:
            # Under expert choice the routing lists remote tokens too; otherwise it is as long as it must be.
            return moe.compute_locally(x, routing, trim=not routing.choices_per_token)
        experts, order = moe.experts, TokenPermutation.from_routing(routing)
        levels, counts = self.hierarchical, [order.counts]
        if levels is not None:
            by_node = levels.sort_by_node(routing)
            counts.append(by_node.counts)
        tokens, all_counts = self._gather_counts(len(x), counts)
        token_counts = all_counts[:, : len(order.counts)].contiguous()
        order = order.truncate(int(token_counts[self.axis.index].sum()))
        limit = self.max_tokens_at_once(moe, tokens)
        most = max_received_tokens(token_counts, self.etp) if levels is None else levels.max_received(all_counts)
        if most > limit:
            chunks = DispatchChunks(self.axis, token_counts, self.etp, num_chunks(token_counts, self.etp, limit))
            return lambda: order.unpermute(
                run_in_chunks(experts, order.permute(x), order.dropout_keys, chunks), routing.weights
            )
        if levels is not None:
            return levels.start(experts, x, routing, by_node, all_counts)
        permuted = order.permute(x)
        all_to_all = TokenAllToAll(self.axis, token_counts, len(permuted), x.device, etp=self.etp)
        arrived = all_to_all.start_dispatch(permuted)
        keys = None if order.dropout_keys is None else all_to_all.dispatch(order.dropout_keys)
        return lambda: order.unpermute(
            all_to_all.start_combine(experts(arrived(), all_to_all.expert_ends, keys))(), routing.weights
        )

    def max_tokens_at_once(self, moe: MoELayer, tokens: int) -> int:
        """Return the most expert tokens that a rank holds at a time, given the tokens of the rank with most.

        See [Note: a limit on received tokens] in chunked_dispatch.py.
        """
        return math.ceil(self.max_load_factor * moe.gate.k * tokens * self.etp)

    def _gather_counts(self, tokens: int, counts: list[Tensor]) -> tuple[int, Tensor]:
        """Return (most tokens of a rank, all ranks' [ranks, counts]) on the host, the same on all ranks."""
        local = torch.cat([*counts, counts[0].new_tensor([tokens])])
        gathered = self.axis.all_gather(local).cpu()
        return int(gathered[:, -1].max()), gathered[:, :-1].contiguous()


@dataclass(frozen=True)
class TokenPositions:
    """The positions of each rank's tokens in a sequence."""

    positions: Tensor
    """[ranks, T]; padding lies beyond the sequence's length"""
    length: int
    padded_len: int
    """above every position"""


@lru_cache(maxsize=8)
def _contiguous_positions(ranks: int, local: int, length: int, device: torch.device) -> TokenPositions:
    return TokenPositions(torch.arange(ranks * local, device=device).view(ranks, local), length, ranks * local)


@lru_cache(maxsize=8)
def _zigzag_positions(order: ZigzagOrder, tp: int, local: int, device: torch.device) -> TokenPositions:
    cp = order.ring_size * order.ulysses_size
    each = torch.tensor([order.rank_positions(rank) for rank in range(cp)], device=device)
    padding = tp * local - each.shape[1]
    each = torch.nn.functional.pad(each, (0, padding), value=order.padded_len)  # padding of sequence parallelism
    return TokenPositions(each.view(-1, local), order.seq_len, order.padded_len + 1)


class _GatherScores(Function):
    """All-gather of scores to full sequences."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dispatch: AllToAllTokenDispatcher, placement: TokenPositions) -> Tensor:
        ctx.dispatch, ctx.placement = dispatch, placement
        gathered = scores
        for axis in (dispatch.tp, dispatch.cp):
            if axis is not None:
                gathered = axis.all_gather(gathered)
        parts = gathered.view(len(placement.positions), *scores.shape).transpose(0, 1).flatten(1, 2)
        out = parts.new_empty(len(scores), placement.padded_len, scores.shape[2])
        return out.index_copy_(1, placement.positions.flatten(), parts)[:, : placement.length].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient, dispatch, length = gradients[0].contiguous(), ctx.dispatch, ctx.placement.length
        if dispatch.cp is not None:
            dispatch.cp.all_reduce(gradient)
        local = ctx.placement.positions[dispatch.sequence_shard_index]
        local_gradient = gradient.index_select(1, local.clamp(max=length - 1))
        return local_gradient.masked_fill((local >= length).unsqueeze(-1), 0.0), None, None
