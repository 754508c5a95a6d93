"""Tokens on their way to experts on other ranks, and scores on their way to whole groups.

[Note: which way]

Every rank first tells all others how many rows of each expert it has, a message of small numbers that the host waits
for. From these all ranks decide alike:

    some rank would have more rows than it has room for    rounds (rounds.py)
    a layout with ep_inner                                 two hops (hops.py)
    otherwise                                              one leg out, the experts, one leg back (leg.py)

A rank to which no row comes issues the same messages as the others.

[Note: whole groups]

A gate decides for whole sequences. Their scores are gathered over the ranks that have parts of them (cp, and tp under
sequence parallelism), in the sequence's order, without padding. Every one of these ranks then decides the same, and
keeps what concerns its own tokens. In backward the ranks of cp have different parts of a loss, so gradients of scores
are summed over cp; those of tp have the same, so each keeps its own.
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
from echelon.parallel.ep.chunked_dispatch import max_received_tokens, run_in_chunks
from echelon.parallel.ep.cost import EP_ETP_AXIS, MAX_LOAD_FACTOR
from echelon.parallel.ep.hierarchical_all_to_all import HierarchicalAllToAll
from echelon.parallel.ep.token_all_to_all import TokenAllToAll
from echelon.parallel.tp.tp_collectives import RegionBoundary
from echelon.rng import RandomDraws


class AllToAllTokenDispatcher:
    """One rank's way to all experts and to the rest of its groups."""

    def __init__(
        self,
        layout: Layout,
        axes: MeshAxes,
        boundary: RegionBoundary | None,
        context: ContextParallel | None,
        *,
        experts: int,
    ):
        axes.add(EP_ETP_AXIS)
        self.axis, self.etp = axes[EP_ETP_AXIS], layout.etp
        self.hierarchical: HierarchicalAllToAll | None = None
        if layout.ep_inner > 1:
            near, far = f"{EP_ETP_AXIS}/{layout.ep_inner}", f"{EP_ETP_AXIS}%{layout.ep_inner}"
            self.hierarchical = HierarchicalAllToAll(
                axes.get_or_add(far), axes.get_or_add(near), etp=layout.etp, experts=experts
            )
        self.max_load_factor = MAX_LOAD_FACTOR
        self.tp, self.cp = axes["tp"], axes["cp"] if context is not None else None
        self.boundary, self.context = boundary, context

    # -- whole groups -------------------------------------------------------------------------------------------------

    def route(self, mixture: MoELayer, x: Tensor) -> Routing:
        gate = mixture.gate
        if self.tp.size == 1 and self.cp is None:
            found: Routing = gate(x)
            return found
        at = self._positions(x)
        mine, length = at.positions[self.sequence_shard_index], at.length
        for module in (*gate.modules(), mixture.experts.drop):
            if isinstance(module, RandomDraws):
                module.window = {**module.window, 1: (mine, length)}
        routing: Routing = gate(x, lambda scores: gate.route(_GatherScores.apply(scores, self, at)))
        rows = torch.arange(len(x), device=x.device).unsqueeze(1) * length
        return routing.select_tokens(torch.where(mine < length, rows + mine, len(x) * length).flatten())

    @property
    def sequence_shard_index(self) -> int:
        """This rank's place among those that have parts of its sequences."""
        return (self.cp.index if self.cp is not None else 0) * self.tp.size + self.tp.index

    def _positions(self, x: Tensor) -> TokenPositions:
        local = x.shape[1]
        if self.context is None:
            length = self.boundary.length if self.boundary is not None else local
            return _contiguous_positions(self.tp.size, local, length, x.device)
        return _zigzag_positions(
            self.context.order, self.context.axis.size, self.tp.size, local, self.context.seq_len, x.device
        )

    # -- experts ------------------------------------------------------------------------------------------------------

    def dispatch(self, mixture: MoELayer, x: Tensor, routing: Routing) -> Callable[[], Tensor]:
        if self.axis.size == 1:
            # Where experts chose, those of tokens elsewhere are in the list; elsewhere it is as long as it must be.
            return mixture.compute_locally(x, routing, trim=not routing.choices_per_token)
        experts, order = mixture.experts, TokenPermutation.from_routing(routing)
        to_nodes = self.hierarchical.sort_by_node(routing) if self.hierarchical is not None else None
        tokens, census = self._gather_counts(
            len(x), [order.counts] if to_nodes is None else [order.counts, to_nodes.counts]
        )
        table = census[:, : len(order.counts)].contiguous()
        order = order.truncate(int(table[self.axis.index].sum()))
        limit = self.max_tokens_at_once(mixture, tokens)
        arriving = (
            max_received_tokens(table, self.etp)
            if self.hierarchical is None
            else self.hierarchical.max_received(census)
        )
        if arriving > limit:
            return lambda: order.unpermute(
                run_in_chunks(
                    experts, order.permute(x), order.dropout_keys, self.axis, table, etp=self.etp, limit=limit
                ),
                routing.weights,
            )
        if self.hierarchical is not None:
            assert to_nodes is not None
            return self.hierarchical.start(experts, x, routing, to_nodes, census)
        rows = order.permute(x)
        leg = TokenAllToAll(self.axis, table, len(rows), x.device, etp=self.etp)
        arrived = leg.start_dispatch(rows)
        keys = None if order.dropout_keys is None else leg.dispatch(order.dropout_keys)
        return lambda: order.unpermute(leg.start_combine(experts(arrived(), leg.expert_ends, keys))(), routing.weights)

    def max_tokens_at_once(self, mixture: MoELayer, tokens: int) -> int:
        """Rows of experts that are here at a time at most: see [Note: a ceiling] in rounds.py. `tokens` are those of
        the rank that has most."""
        return math.ceil(self.max_load_factor * mixture.gate.k * tokens * self.etp)

    def _gather_counts(self, tokens: int, counts: list[Tensor]) -> tuple[int, Tensor]:
        """(most tokens of a rank, [ranks, counts]): everyone's, on the host. All ranks see the same, and so decide the
        same."""
        mine = torch.cat([*counts, counts[0].new_tensor([tokens])])
        found = mine.new_empty(self.axis.size, len(mine))
        self.axis.start_all_gather(found.view(-1), mine).wait()
        here = found.cpu()
        return int(here[:, -1].max()), here[:, :-1].contiguous()


@dataclass(frozen=True)
class TokenPositions:
    """Where each rank's tokens are in a sequence."""

    positions: Tensor
    """[ranks, T]; padding is beyond the sequence's length"""
    length: int
    padded_len: int
    """above every place"""


@lru_cache(maxsize=8)
def _contiguous_positions(ranks: int, local: int, length: int, device: torch.device) -> TokenPositions:
    return TokenPositions(torch.arange(ranks * local, device=device).view(ranks, local), length, ranks * local)


@lru_cache(maxsize=8)
def _zigzag_positions(
    order: ZigzagOrder, cp: int, tp: int, local: int, length: int, device: torch.device
) -> TokenPositions:
    each = torch.tensor([order.rank_positions(rank) for rank in range(cp)], device=device)
    padding = tp * local - each.shape[1]
    each = torch.nn.functional.pad(each, (0, padding), value=order.padded_len)  # sequence parallelism's
    return TokenPositions(each.view(-1, local), length, order.padded_len + 1)


class _GatherScores(Function):
    """Scores of whole sequences, from each rank's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dispatch: AllToAllTokenDispatcher, at: TokenPositions) -> Tensor:
        ctx.dispatch, ctx.at = dispatch, at
        found = scores.contiguous()
        for axis in (dispatch.tp, dispatch.cp):
            if axis is not None:
                whole = found.new_empty(axis.size, *found.shape)
                axis.start_all_gather(whole.view(-1), found.view(-1)).wait()
                found = whole
        parts = found.view(len(at.positions), *scores.shape).transpose(0, 1).flatten(1, 2)
        out = parts.new_empty(len(scores), at.padded_len, scores.shape[2])
        return out.index_copy_(1, at.positions.flatten(), parts)[:, : at.length].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient, dispatch, length = gradients[0].contiguous(), ctx.dispatch, ctx.at.length
        if dispatch.cp is not None:
            dispatch.cp.all_reduce(gradient)
        mine = ctx.at.positions[dispatch.sequence_shard_index]
        own = gradient.index_select(1, mine.clamp(max=length - 1))
        return own.masked_fill((mine >= length).unsqueeze(-1), 0.0), None, None
