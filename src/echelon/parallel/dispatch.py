"""Tokens on their way to experts on other ranks, and scores on their way to whole groups.

[Note: there and back]

Assignments lie by expert (moe/sorted.py), so what goes to one rank is one run of rows:

    1. how many rows of each expert go where     an all-to-all of small numbers, which the host must know
    2. rows                                      an all-to-all; they arrive by sender, and for each sender by expert
    3. by expert                                 so that each expert has one run
    4. experts                                   also where there is no row at all: every rank issues the same messages
    5. back                                      3 and 2 the other way round

With etp, a row goes to every rank that has a part of its expert, and the parts of its result are added up at home.

[Note: whole groups]

A gate decides for whole sequences. Their scores are gathered over the ranks that have parts of them (cp, and tp under
sequence parallelism), in the sequence's order, without padding. Every one of these ranks then decides the same, and
keeps what concerns its own tokens. In backward the ranks of cp have different parts of a loss, so gradients of scores
are summed over cp; those of tp have the same, so each keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.layout import Layout
from echelon.moe.experts import Experts
from echelon.moe.gate import Gate
from echelon.moe.routing import Routing
from echelon.moe.sorted import Sorted
from echelon.parallel.axis import Axes, Axis
from echelon.parallel.expert import TOGETHER
from echelon.parallel.regions import Boundary
from echelon.parallel.spread import Context
from echelon.rng import Draws


class Dispatch:
    """One rank's way to all experts and to the rest of its groups."""

    def __init__(self, layout: Layout, axes: Axes, boundary: Boundary | None, context: Context | None):
        axes.add(TOGETHER)
        self.axis, self.etp = axes[TOGETHER], layout.etp
        self.tp, self.cp = axes["tp"], axes["cp"] if context is not None else None
        self.boundary, self.context = boundary, context

    # -- whole groups -------------------------------------------------------------------------------------------------

    def route(self, gate: Gate, x: Tensor) -> Routing:
        if self.tp.size == 1 and self.cp is None:
            return gate.route(gate.scores(x))
        places, length = self._places(x)
        for module in gate.modules():
            if isinstance(module, Draws):
                module.window = {**module.window, 1: (places[self._mine], length)}
        whole: Tensor = _Gathered.apply(gate.scores(x), self, places, length)
        routing = gate.route(whole)
        mine = places[self._mine]
        rows = torch.arange(len(x), device=x.device).unsqueeze(1) * length
        return routing.keep(torch.where(mine < length, rows + mine, len(x) * length).flatten())

    @property
    def _mine(self) -> int:
        return (self.cp.index if self.cp is not None else 0) * self.tp.size + self.tp.index

    def _places(self, x: Tensor) -> tuple[Tensor, int]:
        """([ranks, T]: where each rank's tokens are in the sequence, the sequence's length); padding is beyond it."""
        local = x.shape[1]
        if self.context is None:
            length = self.boundary.length if self.boundary is not None else local
            return torch.arange(self.tp.size * local, device=x.device).view(self.tp.size, local), length
        order, length = self.context.order, self.context.length
        each = torch.tensor([order.places(rank) for rank in range(self.context.axis.size)], device=x.device)
        padding = self.tp.size * local - each.shape[1]
        each = torch.nn.functional.pad(each, (0, padding), value=order.padded)  # sequence parallelism's
        return each.view(-1, local), length

    # -- experts ------------------------------------------------------------------------------------------------------

    def through(self, experts: Experts, x: Tensor, order: Sorted) -> Tensor:
        rows = order.sent(x)
        if self.axis.size == 1:
            return experts.forward(rows, order.ends)
        parts, local = self.axis.size // self.etp, len(order.counts) * self.etp // self.axis.size
        outgoing = order.counts.view(parts, 1, local).expand(parts, self.etp, local).reshape(self.axis.size, local)
        incoming = torch.empty_like(outgoing)
        self.axis.start_all_to_all(incoming, outgoing.contiguous()).wait()
        sent, received = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        used = sum(sent[:: self.etp])
        leaving = rows[:used]
        if self.etp > 1:
            runs = leaving.split(sent[:: self.etp])
            leaving = torch.cat([run for run in runs for _ in range(self.etp)])
        arrived: Tensor = _Exchange.apply(leaving, self.axis, sent, received)
        by_expert = _by_expert(incoming)
        ends = incoming.sum(0).cumsum(0).to(torch.int32)
        made = experts(arrived.index_select(0, by_expert), ends)
        home = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=x.device))
        returned: Tensor = _Exchange.apply(made.index_select(0, home), self.axis, received, sent)
        if self.etp > 1:
            runs = returned.split(sent)
            each = [sum(runs[i + 1 : i + self.etp], runs[i]) for i in range(0, len(runs), self.etp)]
            returned = torch.cat(each)
        return torch.nn.functional.pad(returned, (0, 0, 0, len(rows) - used))


def _by_expert(incoming: Tensor) -> Tensor:
    """[rows]: rows that came by sender and expert, by expert. `incoming` [senders, experts] counts them."""
    senders, experts = incoming.shape
    expert = torch.arange(experts, device=incoming.device).repeat(senders).repeat_interleave(incoming.flatten())
    return torch.argsort(expert, stable=True)


class _Exchange(Function):
    """Runs of rows to their ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return _exchanged(x, axis, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.axis, ctx.received, ctx.sent), None, None, None


def _exchanged(x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    axis.start_all_to_all(out, x.contiguous(), received, sent).wait()
    return out


class _Gathered(Function):
    """Scores of whole sequences, from each rank's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dispatch: Dispatch, places: Tensor, length: int) -> Tensor:
        ctx.dispatch, ctx.places, ctx.length = dispatch, places, length
        found = scores.contiguous()
        for axis in (dispatch.tp, dispatch.cp):
            if axis is not None:
                whole = found.new_empty(axis.size, *found.shape)
                axis.start_all_gather(whole.view(-1), found.view(-1)).wait()
                found = whole
        parts = found.view(len(places), *scores.shape).transpose(0, 1).flatten(1, 2)
        flat = places.flatten()
        out = parts.new_empty(len(scores), int(flat.max()) + 1, scores.shape[2])
        return out.index_copy_(1, flat, parts)[:, :length].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, dispatch = gradients[0].contiguous(), ctx.dispatch
        if dispatch.cp is not None:
            dispatch.cp.all_reduce(gradient)
        mine = ctx.places[dispatch._mine]
        own = gradient.index_select(1, mine.clamp(max=ctx.length - 1))
        return own.masked_fill((mine >= ctx.length).unsqueeze(-1), 0.0), None, None, None
