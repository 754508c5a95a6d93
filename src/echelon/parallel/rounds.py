"""Rounds: a rank to which more rows come than it has room for works them off in parts.

[Note: a ceiling]
Gates promise nothing: all tokens of all ranks may choose the experts of one. That rank then never has more than `limit`
rows at a time. Of what each rank sends to each other, a round takes an equal part, so that in every round all ranks
have their share of the work, and no more than

    sum over senders of ceil(rows for this rank / rounds) <= limit

rows are here, with all that the experts make of them. Nothing of a round is kept: in backward its rows come again, with
the gradients of what became of them. Every rank sees the same table, and so knows the same number of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.moe.experts import Experts
from echelon.parallel.axis import Axis
from echelon.parallel.leg import Leg


def most(table: Tensor, etp: int) -> int:
    """Rows that the fullest rank receives, by a leg's table."""
    return int(_runs(table, etp).sum(0).max())


def num_rounds(table: Tensor, etp: int, limit: int) -> int:
    """The fewest rounds in which no rank has more than `limit` rows at a time, or than one of each sender."""
    runs, limit = _runs(table, etp), max(limit, len(table))
    rounds = max(1, -(-most(table, etp) // limit))
    while int((-(-runs // rounds)).sum(0).max()) > limit:
        rounds += 1
    return rounds


def through(
    experts: Experts, rows: Tensor, keys: Tensor | None, axis: Axis, table: Tensor, *, etp: int, limit: int
) -> Tensor:
    """[total, width]: what the experts make of this rank's rows, in their order."""
    rounds = num_rounds(table, etp, limit)
    parts = [_Round.of(axis, table, etp, number, rounds, rows.device) for number in range(rounds)]
    out: Tensor = _InRounds.apply(rows, experts.up, experts.down, keys, experts, parts)
    return out


def _runs(table: Tensor, etp: int) -> Tensor:
    """[ranks, parts]: rows from each rank to those that have a part of the experts."""
    ranks, experts = table.shape
    return table.view(ranks, ranks // etp, experts * etp // ranks).sum(2)


@dataclass(frozen=True)
class _Round:
    leg: Leg
    index: Tensor
    """which of this rank's rows it takes"""

    @classmethod
    def of(cls, axis: Axis, table: Tensor, etp: int, number: int, rounds: int, device: torch.device) -> _Round:
        ranks, experts = table.shape
        each = table.view(ranks, ranks // etp, experts * etp // ranks)
        ends = each.cumsum(2)
        runs = ends[..., -1:]
        first, last = runs * number // rounds, runs * (number + 1) // rounds
        taken = (ends.minimum(last) - (ends - each).maximum(first)).clamp(min=0)
        starts = runs[axis.index, :, 0].cumsum(0) - runs[axis.index, :, 0]
        slices = zip(starts.tolist(), first[axis.index, :, 0].tolist(), last[axis.index, :, 0].tolist(), strict=True)
        index = torch.cat([torch.arange(start + low, start + high) for start, low, high in slices]).to(device)
        return cls(Leg(axis, taken.reshape(ranks, experts), len(index), device, etp=etp), index)

    def arrived(self, x: Tensor) -> Tensor:
        return self.leg.out(x.index_select(0, self.index))

    def bring_home(self, made: Tensor, to: Tensor) -> None:
        to.index_copy_(0, self.index, self.leg.back(made))


class _InRounds(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up: Tensor,
        down: Tensor,
        keys: Tensor | None,
        experts: Experts,
        rounds: list[_Round],
    ) -> Tensor:
        ctx.save_for_backward(rows, up, down, keys)
        ctx.experts, ctx.rounds = experts, rounds
        out = torch.zeros_like(rows)
        for part in rounds:
            own = None if keys is None else part.arrived(keys)
            made = experts.with_weights(part.arrived(rows), up, down, part.leg.ends, own)
            part.bring_home(made, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, up, down, keys = ctx.saved_tensors
        home = torch.zeros_like(rows)
        weights = [tensor.detach().requires_grad_() for tensor in (up, down)]
        sums: list[Tensor] = []
        for part in ctx.rounds:
            own = None if keys is None else part.arrived(keys)
            x, gradient = part.arrived(rows).requires_grad_(), part.arrived(gradients[0])
            with torch.enable_grad():
                made = ctx.experts.with_weights(x, *weights, part.leg.ends, own)
            dx, *found = torch.autograd.grad(made, (x, *weights), gradient)
            part.bring_home(dx, home)
            sums = [total.add_(more) for total, more in zip(sums, found, strict=True)] if sums else found
        return home, *sums, None, None, None
