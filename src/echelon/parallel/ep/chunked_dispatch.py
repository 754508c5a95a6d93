"""Rounds: a rank to which more rows come than it has room for works them off in parts.

[Note: a ceiling]
Gates promise nothing: all tokens of all ranks may choose the experts of one. That rank then never has more than `limit`
rows at a time. Of what each rank sends to each other, a round takes an equal part, so that in every round all ranks
have their share of the work, and no more than

    sum over senders of ceil(rows for this rank / rounds) <= limit

rows are here, with all that the experts make of them. Nothing of a round is kept: in backward its rows come again, with
the gradients of what became of them. Every rank of a copy of the experts sees the same table, and so knows the same
number of rounds. Other copies may have none, so the experts are still called once, as they are there: around that call
parameters that are divided over the copies are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.moe.experts import Experts
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.token_all_to_all import TokenAllToAll


def max_received_tokens(token_counts: Tensor, etp: int) -> int:
    """Rows that the fullest rank receives, by a leg's table."""
    return int(_tokens_per_part(token_counts, etp).sum(0).max())


def num_chunks(token_counts: Tensor, etp: int, limit: int) -> int:
    """The fewest rounds in which no rank has more than `limit` rows at a time, or than one of each sender."""
    runs, limit = _tokens_per_part(token_counts, etp), max(limit, len(token_counts))
    rounds = max(1, -(-max_received_tokens(token_counts, etp) // limit))
    while int((-(-runs // rounds)).sum(0).max()) > limit:
        rounds += 1
    return rounds


def run_in_chunks(
    experts: Experts, tokens: Tensor, keys: Tensor | None, axis: MeshAxis, token_counts: Tensor, *, etp: int, limit: int
) -> Tensor:
    """[total, width]: what the experts make of this rank's rows, in their order."""
    rounds = DispatchChunks(axis, token_counts, etp, num_chunks(token_counts, etp, limit))

    def run(called: Experts) -> Tensor:
        out: Tensor = _ChunkedExperts.apply(tokens, called.up, called.down, keys, called, rounds)
        return out

    made: Tensor = experts(tokens, tokens.new_empty(0), through=run)
    return made


def _tokens_per_part(table: Tensor, etp: int) -> Tensor:
    """[ranks, parts]: rows from each rank to those that have a part of the experts."""
    ranks, experts = table.shape
    return table.view(ranks, ranks // etp, experts * etp // ranks).sum(2)


@dataclass(frozen=True)
class DispatchChunks:
    """All rounds of a layer; one at a time is made, for what it takes to know the way of its rows is as much as they
    are many."""

    axis: MeshAxis
    token_counts: Tensor
    etp: int
    num_chunks: int

    def chunks(self, device: torch.device) -> Iterator[DispatchChunk]:
        ranks, experts = self.token_counts.shape
        mine = self.axis.index
        each = self.token_counts.view(ranks, ranks // self.etp, experts * self.etp // ranks)
        ends = each.cumsum(2)
        runs = ends[..., -1:]
        starts = (runs[mine].cumsum(0) - runs[mine]).flatten().tolist()
        for turn in range(self.num_chunks):
            first, last = runs * turn // self.num_chunks, runs * (turn + 1) // self.num_chunks
            taken = (ends.minimum(last) - (ends - each).maximum(first)).clamp(min=0).reshape(ranks, experts)
            slices = zip(starts, first[mine].flatten().tolist(), last[mine].flatten().tolist(), strict=True)
            index = torch.cat([torch.arange(start + low, start + high) for start, low, high in slices]).to(device)
            yield DispatchChunk(TokenAllToAll(self.axis, taken, len(index), device, etp=self.etp), index)


@dataclass(frozen=True)
class DispatchChunk:
    all_to_all: TokenAllToAll
    index: Tensor
    """which of this rank's rows it takes"""

    def dispatch(self, x: Tensor) -> Tensor:
        return self.all_to_all.dispatch(x.index_select(0, self.index))

    def combine_into(self, made: Tensor, to: Tensor) -> None:
        to.index_copy_(0, self.index, self.all_to_all.combine(made))


class _ChunkedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up: Tensor,
        down: Tensor,
        keys: Tensor | None,
        experts: Experts,
        rounds: DispatchChunks,
    ) -> Tensor:
        ctx.save_for_backward(rows, up, down, keys)
        ctx.experts, ctx.rounds = experts, rounds
        out = torch.zeros_like(rows)
        for part in rounds.chunks(rows.device):
            own = None if keys is None else part.dispatch(keys)
            made = experts.apply_weights(part.dispatch(rows), up, down, part.all_to_all.expert_ends, own)
            part.combine_into(made, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, up, down, keys = ctx.saved_tensors
        home = torch.zeros_like(rows)
        weights = [tensor.detach().requires_grad_() for tensor in (up, down)]
        sums: list[Tensor] = []
        for part in ctx.rounds.chunks(rows.device):
            own = None if keys is None else part.dispatch(keys)
            x, gradient = part.dispatch(rows).requires_grad_(), part.dispatch(gradients[0])
            with torch.enable_grad():
                made = ctx.experts.apply_weights(x, *weights, part.all_to_all.expert_ends, own)
            dx, *found = torch.autograd.grad(made, (x, *weights), gradient)
            part.combine_into(dx, home)
            sums = [total.add_(more) for total, more in zip(sums, found, strict=True)] if sums else found
        return home, *sums, None, None, None
