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

from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxis, PendingWork


class TokenAllToAll:
    """The way between this rank's `total` rows, of which the last may go nowhere, and the rows of its experts."""

    def __init__(self, axis: MeshAxis, token_counts: Tensor, num_tokens: int, device: torch.device, *, etp: int = 1):
        self.axis, self.num_tokens, self.etp = axis, num_tokens, etp
        ranks, experts = token_counts.shape
        by_part = token_counts.view(ranks, ranks // etp, experts * etp // ranks)
        runs, mine = by_part.sum(2), by_part[:, axis.index // etp]
        self._send_splits_per_part: list[int] = runs[axis.index].tolist()
        self._send_splits: list[int] = runs[axis.index].repeat_interleave(etp).tolist()
        self._receive_splits: list[int] = runs[:, axis.index // etp].tolist()
        self.expert_ends = mine.sum(0).cumsum(0).to(device, torch.int32)
        """where each expert's run of arrived rows ends"""
        self._by_expert: Tensor | None = None
        if mine.shape[1] > 1:
            each = torch.arange(mine.shape[1], device=device).repeat(ranks)
            sizes, arrived = mine.flatten().to(device), sum(self._receive_splits)
            expert = torch.repeat_interleave(each, sizes, output_size=arrived)
            order = torch.argsort(expert, stable=True)
            place = torch.empty_like(order).scatter_(0, order, torch.arange(arrived, device=device))
            self._by_expert, self._by_sender = order, place

    # -- without a gradient -------------------------------------------------------------------------------------------

    def dispatch(self, tokens: Tensor) -> Tensor:
        """What arrives here, by expert."""
        return self._finish(*self._start(tokens, dispatching=True), dispatching=True)

    def combine(self, expert_output: Tensor) -> Tensor:
        """[total, ...]: what comes home; 0 for rows that went nowhere."""
        return self._finish(*self._start(expert_output, dispatching=False), dispatching=False)

    def _start(self, x: Tensor, *, dispatching: bool) -> tuple[Tensor, PendingWork]:
        if dispatching:
            x = x[: sum(self._send_splits_per_part)]
            if self.etp > 1:
                x = torch.cat([run for run in x.split(self._send_splits_per_part) for _ in range(self.etp)])
        elif self._by_expert is not None:
            x = x.index_select(0, self._by_sender)
        sent, received = (
            (self._send_splits, self._receive_splits) if dispatching else (self._receive_splits, self._send_splits)
        )
        arriving = x.new_empty(sum(received), *x.shape[1:])
        return arriving, self.axis.start_all_to_all(arriving, x.contiguous(), received, sent)

    def _finish(self, arriving: Tensor, pending: PendingWork, *, dispatching: bool) -> Tensor:
        pending.wait()
        if dispatching:
            return arriving if self._by_expert is None else arriving.index_select(0, self._by_expert)
        if self.etp > 1:
            runs = arriving.split(self._send_splits)
            arriving = torch.cat([sum(runs[i + 1 : i + self.etp], runs[i]) for i in range(0, len(runs), self.etp)])
        missing = self.num_tokens - len(arriving)
        return torch.cat([arriving, arriving.new_zeros(missing, *arriving.shape[1:])]) if missing else arriving

    # -- with one -----------------------------------------------------------------------------------------------------

    def start_dispatch(self, tokens: Tensor) -> Callable[[], Tensor]:
        """Begins at once; who asks waits, and gets what arrived."""
        return _start_async(tokens, self, outward=True)

    def start_combine(self, expert_output: Tensor) -> Callable[[], Tensor]:
        return _start_async(expert_output, self, outward=False)


class _AsyncAllToAll:
    def __init__(self, leg: TokenAllToAll, outward: bool):
        self.all_to_all, self.dispatching = leg, outward
        self.pending: tuple[Tensor, PendingWork] = (torch.empty(0), CompletedWork())

    def start(self, x: Tensor, *, backward: bool = False) -> None:
        self.pending = self.all_to_all._start(x, dispatching=self.dispatching != backward)

    def finish(self, *, backward: bool = False) -> Tensor:
        arriving, pending = self.pending
        self.pending = (torch.empty(0), CompletedWork())
        return self.all_to_all._finish(arriving, pending, dispatching=self.dispatching != backward)


def _start_async(x: Tensor, leg: TokenAllToAll, *, outward: bool) -> Callable[[], Tensor]:
    flight = _AsyncAllToAll(leg, outward)
    begun = _StartAllToAll.apply(x, flight)

    def end() -> Tensor:
        out: Tensor = _FinishAllToAll.apply(begun, flight)
        return out

    return end


class _StartAllToAll(Function):
    """The message is not among autograd's tensors: nobody may look at it before it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        flight.start(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.finish(backward=True), None


class _FinishAllToAll(Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, flight: _AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        return flight.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.flight.start(gradients[0], backward=True)
        return gradients[0].new_empty(0), None
