"""A leg: rows on their way to the ranks of their experts, and back.

[Note: there and back]

Rows lie by expert (moe/token_permutation.py), and a table says how many of each expert every rank has. Everything follows from it:

    table [ranks, experts]    experts lie on the ranks in their order; `etp` neighbours hold parts of the same experts

    out     1. a run of rows goes to each rank; with etp, to every rank that has a part of its experts
            2. runs arrive by sender, and for each sender by expert; they are put by expert
    back    2 and 1 the other way round; what the parts of an expert made is added up at home

Each is the gradient of the other. Beginning and ending are two nodes of autograd's graph: whatever is computed between
them in forward is, in backward, computed while the gradients are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.parallel.comm.mesh_axis import Axis, Done, Pending


class Leg:
    """The way between this rank's `total` rows, of which the last may go nowhere, and the rows of its experts."""

    def __init__(self, axis: Axis, table: Tensor, total: int, device: torch.device, *, etp: int = 1):
        self.axis, self.total, self.etp = axis, total, etp
        ranks, experts = table.shape
        by_part = table.view(ranks, ranks // etp, experts * etp // ranks)
        runs, mine = by_part.sum(2), by_part[:, axis.index // etp]
        self._runs: list[int] = runs[axis.index].tolist()
        self._sent: list[int] = runs[axis.index].repeat_interleave(etp).tolist()
        self._received: list[int] = runs[:, axis.index // etp].tolist()
        self.ends = mine.sum(0).cumsum(0).to(device, torch.int32)
        """where each expert's run of arrived rows ends"""
        self._by_expert: Tensor | None = None
        if mine.shape[1] > 1:
            each = torch.arange(mine.shape[1], device=device).repeat(ranks)
            sizes, arrived = mine.flatten().to(device), sum(self._received)
            expert = torch.repeat_interleave(each, sizes, output_size=arrived)
            order = torch.argsort(expert, stable=True)
            place = torch.empty_like(order).scatter_(0, order, torch.arange(arrived, device=device))
            self._by_expert, self._by_sender = order, place

    # -- without a gradient -------------------------------------------------------------------------------------------

    def out(self, rows: Tensor) -> Tensor:
        """What arrives here, by expert."""
        return self._end(*self._begin(rows, outward=True), outward=True)

    def back(self, made: Tensor) -> Tensor:
        """[total, ...]: what comes home; 0 for rows that went nowhere."""
        return self._end(*self._begin(made, outward=False), outward=False)

    def _begin(self, x: Tensor, *, outward: bool) -> tuple[Tensor, Pending]:
        if outward:
            x = x[: sum(self._runs)]
            if self.etp > 1:
                x = torch.cat([run for run in x.split(self._runs) for _ in range(self.etp)])
        elif self._by_expert is not None:
            x = x.index_select(0, self._by_sender)
        sent, received = (self._sent, self._received) if outward else (self._received, self._sent)
        arriving = x.new_empty(sum(received), *x.shape[1:])
        return arriving, self.axis.start_all_to_all(arriving, x.contiguous(), received, sent)

    def _end(self, arriving: Tensor, pending: Pending, *, outward: bool) -> Tensor:
        pending.wait()
        if outward:
            return arriving if self._by_expert is None else arriving.index_select(0, self._by_expert)
        if self.etp > 1:
            runs = arriving.split(self._sent)
            arriving = torch.cat([sum(runs[i + 1 : i + self.etp], runs[i]) for i in range(0, len(runs), self.etp)])
        missing = self.total - len(arriving)
        return torch.cat([arriving, arriving.new_zeros(missing, *arriving.shape[1:])]) if missing else arriving

    # -- with one -----------------------------------------------------------------------------------------------------

    def start_out(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begins at once; who asks waits, and gets what arrived."""
        return _flight(rows, self, outward=True)

    def start_back(self, made: Tensor) -> Callable[[], Tensor]:
        return _flight(made, self, outward=False)


class _Flight:
    def __init__(self, leg: Leg, outward: bool):
        self.leg, self.outward = leg, outward
        self.under_way: tuple[Tensor, Pending] = (torch.empty(0), Done())

    def begin(self, x: Tensor, *, gradient: bool = False) -> None:
        self.under_way = self.leg._begin(x, outward=self.outward != gradient)

    def end(self, *, gradient: bool = False) -> Tensor:
        arriving, pending = self.under_way
        self.under_way = (torch.empty(0), Done())
        return self.leg._end(arriving, pending, outward=self.outward != gradient)


def _flight(x: Tensor, leg: Leg, *, outward: bool) -> Callable[[], Tensor]:
    flight = _Flight(leg, outward)
    begun = _Begin.apply(x, flight)

    def end() -> Tensor:
        out: Tensor = _End.apply(begun, flight)
        return out

    return end


class _Begin(Function):
    """The message is not among autograd's tensors: nobody may look at it before it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.begin(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.end(gradient=True), None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.flight.begin(gradients[0], gradient=True)
        return gradients[0].new_empty(0), None
