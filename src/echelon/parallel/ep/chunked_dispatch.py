"""Chunked dispatch: a rank that would receive more tokens than its limit processes them in chunks.

[Note: a limit on received tokens]
Gates promise nothing: all tokens of all ranks may choose the experts of one rank. That rank then never holds more than
`limit` tokens at a time. A chunk takes an equal part of what each rank sends to each other, so that all ranks work in
every chunk, and no more than

    sum over senders of ceil(tokens for this rank / chunks) <= limit

tokens are here, with all their activations. Nothing of a chunk is saved: backward dispatches its tokens again, with the
gradients of their outputs. All ranks of a replica of the experts see the same token counts, and so compute the same
number of chunks. Other replicas may have one, so the experts are still called once, as they are there: hooks around
that call gather parameters that are sharded over the replicas.
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
from echelon.parallel.ep.token_all_to_all import TokenAllToAll, counts_by_part


def max_received_tokens(token_counts: Tensor, etp: int) -> int:
    """Return the tokens that the fullest rank receives."""
    return int(counts_by_part(token_counts, etp).sum(2).sum(0).max())


def num_chunks(token_counts: Tensor, etp: int, limit: int) -> int:
    """Return the fewest chunks in which no rank holds more than `limit` tokens, or than one of each sender."""
    per_part, limit = counts_by_part(token_counts, etp).sum(2), max(limit, len(token_counts))
    chunks = max(1, -(-max_received_tokens(token_counts, etp) // limit))
    while int((-(-per_part // chunks)).sum(0).max()) > limit:
        chunks += 1
    return chunks


def run_in_chunks(experts: Experts, tokens: Tensor, dropout_keys: Tensor | None, chunks: DispatchChunks) -> Tensor:
    """Return the experts' outputs [tokens, width] of this rank's permuted tokens, in their order."""

    def run(called: Experts) -> Tensor:
        out: Tensor = _ChunkedExperts.apply(tokens, called.up, called.down, dropout_keys, called, chunks)
        return out

    output: Tensor = experts(tokens, tokens.new_empty(0), through=run)
    return output


@dataclass(frozen=True)
class DispatchChunks:
    """All chunks of a layer; one exists at a time, since its index is as long as its tokens are many."""

    axis: MeshAxis
    token_counts: Tensor
    etp: int
    num_chunks: int

    def chunks(self, device: torch.device) -> Iterator[DispatchChunk]:
        rank, by_part = self.axis.index, counts_by_part(self.token_counts, self.etp)
        ends = by_part.cumsum(2)
        totals = ends[..., -1:]
        starts = (totals[rank].cumsum(0) - totals[rank]).flatten().tolist()
        for chunk in range(self.num_chunks):
            first, last = totals * chunk // self.num_chunks, totals * (chunk + 1) // self.num_chunks
            counts = (ends.minimum(last) - (ends - by_part).maximum(first)).clamp(min=0)
            counts = counts.reshape(self.token_counts.shape)
            slices = zip(starts, first[rank].flatten().tolist(), last[rank].flatten().tolist(), strict=True)
            index = torch.cat([torch.arange(start + low, start + high) for start, low, high in slices]).to(device)
            yield DispatchChunk(TokenAllToAll(self.axis, counts, len(index), device, etp=self.etp), index)


@dataclass(frozen=True)
class DispatchChunk:
    """One chunk: which of this rank's tokens it takes, and their all-to-all."""

    all_to_all: TokenAllToAll
    index: Tensor
    """which of this rank's permuted tokens it takes"""

    def dispatch(self, x: Tensor) -> Tensor:
        """Return the chunk's tokens that arrive at this rank's experts."""
        return self.all_to_all.dispatch(x.index_select(0, self.index))

    def ends_and_keys(self, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return where each expert's tokens end, and the dropout keys of the tokens that arrive."""
        return self.all_to_all.expert_ends, None if keys is None else self.dispatch(keys)

    def combine_into(self, expert_output: Tensor, output: Tensor) -> None:
        """Send the experts' outputs back, and write them to their tokens' rows."""
        output.index_copy_(0, self.index, self.all_to_all.combine(expert_output))


class _ChunkedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, down: Tensor, keys: Tensor | None, experts: Experts, chunks: DispatchChunks
    ) -> Tensor:
        ctx.save_for_backward(x, up, down, keys)
        ctx.experts, ctx.chunks = experts, chunks
        output = torch.zeros_like(x)
        for chunk in chunks.chunks(x.device):
            ends_and_keys = chunk.ends_and_keys(keys)
            chunk.combine_into(experts.apply_weights(chunk.dispatch(x), up, down, *ends_and_keys), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, up, down, keys = ctx.saved_tensors
        token_grad = torch.zeros_like(tokens)
        weights = [tensor.detach().requires_grad_() for tensor in (up, down)]
        weight_grads: list[Tensor] = []
        for chunk in ctx.chunks.chunks(tokens.device):
            ends_and_keys = chunk.ends_and_keys(keys)
            x, gradient = chunk.dispatch(tokens).requires_grad_(), chunk.dispatch(gradients[0])
            with torch.enable_grad():
                output = ctx.experts.apply_weights(x, *weights, *ends_and_keys)
            dx, *grads = torch.autograd.grad(output, (x, *weights), gradient)
            chunk.combine_into(dx, token_grad)
            pairs = zip(weight_grads, grads, strict=True)
            weight_grads = [total.add_(grad) for total, grad in pairs] if weight_grads else grads
        return token_grad, *weight_grads, None, None, None
