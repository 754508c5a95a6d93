"""`TokenAllToAll`: the all-to-all that dispatches tokens to the ranks of their experts, and combines the outputs.

[Note: dispatch and combine]

Tokens are permuted by expert (moe/token_permutation.py); the token counts of every rank and expert determine the rest:

    token_counts [ranks, experts]    ranks hold experts in order; `etp` neighbours hold parts of the same experts

    dispatch   1. a slice of tokens goes to each rank; with etp, to every rank that holds a part of its experts
               2. slices arrive by sender, and within a sender by expert; they are reordered by expert
    combine    2 and 1 in reverse; the outputs of an expert's parts are summed

Each is the gradient of the other. Start and finish are two nodes of autograd's graph: what forward computes between
them overlaps the gradients' all-to-all in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import CompletedWork, MeshAxis, PendingWork


def counts_by_part(token_counts: Tensor, etp: int) -> Tensor:
    """Return [ranks, parts, experts of a part]: tokens from each rank to each expert; etp ranks share a part."""
    ranks, experts = token_counts.shape
    return token_counts.view(ranks, ranks // etp, experts * etp // ranks)


class TokenAllToAll:
    """The exchange of this rank's `num_tokens` permuted tokens (the last may be dropped) with its experts' tokens."""

    def __init__(self, axis: MeshAxis, token_counts: Tensor, num_tokens: int, device: torch.device, *, etp: int = 1):
        self.axis, self.num_tokens, self.etp = axis, num_tokens, etp
        by_part = counts_by_part(token_counts, etp)
        totals, received = by_part.sum(2), by_part[:, axis.index // etp]
        self._send_splits_per_part: list[int] = totals[axis.index].tolist()
        self._send_splits: list[int] = totals[axis.index].repeat_interleave(etp).tolist()
        self._receive_splits: list[int] = totals[:, axis.index // etp].tolist()
        self.expert_ends = received.sum(0).cumsum(0).to(device, torch.int32)
        """where each expert's received tokens end"""
        self._by_expert: Tensor | None = None
        if received.shape[1] > 1:
            each = torch.arange(received.shape[1], device=device).repeat(len(received))
            sizes, arrived = received.flatten().to(device), sum(self._receive_splits)
            expert = torch.repeat_interleave(each, sizes, output_size=arrived)
            order = torch.argsort(expert, stable=True)
            place = torch.empty_like(order).scatter_(0, order, torch.arange(arrived, device=device))
            self._by_expert, self._by_sender = order, place

    # -- without autograd ---------------------------------------------------------------------------------------------

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Return the tokens that this rank's experts receive, by expert."""
        return self._finish(*self._start(tokens, dispatching=True), dispatching=True)

    def combine(self, expert_output: Tensor) -> Tensor:
        """Return the outputs [num_tokens, ...] of this rank's tokens; 0 for dropped ones."""
        return self._finish(*self._start(expert_output, dispatching=False), dispatching=False)

    def _start(self, x: Tensor, *, dispatching: bool) -> tuple[Tensor, PendingWork]:
        if dispatching:
            x = x[: sum(self._send_splits_per_part)]
            if self.etp > 1:
                x = torch.cat([run for run in x.split(self._send_splits_per_part) for _ in range(self.etp)])
        elif self._by_expert is not None:
            x = x.index_select(0, self._by_sender)
        splits = [self._receive_splits, self._send_splits]
        received, sent = splits if dispatching else splits[::-1]
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

    # -- with autograd ------------------------------------------------------------------------------------------------

    def start_dispatch(self, tokens: Tensor) -> Callable[[], Tensor]:
        """Launch the dispatch; the returned function waits for it."""
        return _AsyncAllToAll(self, dispatching=True).launch(tokens)

    def start_combine(self, expert_output: Tensor) -> Callable[[], Tensor]:
        return _AsyncAllToAll(self, dispatching=False).launch(expert_output)


class _AsyncAllToAll:
    """An all-to-all between its start and its finish, in forward or in backward."""

    def __init__(self, all_to_all: TokenAllToAll, dispatching: bool):
        self.all_to_all, self.dispatching = all_to_all, dispatching
        self.pending: tuple[Tensor, PendingWork] = (torch.empty(0), CompletedWork())

    def launch(self, x: Tensor) -> Callable[[], Tensor]:
        """Start now; the returned function finishes. In backward the first starts what the second finishes."""
        started = with_backward(x, self.start, lambda _: self.finish(backward=True))
        return lambda: with_backward(started, lambda _: self.finish(), partial(self.start, backward=True))

    def start(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """Launch; autograd sees an empty tensor, since the result is not complete yet."""
        self.pending = self.all_to_all._start(x, dispatching=self.dispatching != backward)
        return x.new_empty(0)

    def finish(self, *, backward: bool = False) -> Tensor:
        arriving, pending = self.pending
        self.pending = (torch.empty(0), CompletedWork())
        return self.all_to_all._finish(arriving, pending, dispatching=self.dispatching != backward)
