"""Ulysses: an all-to-all turns some tokens of all heads into all tokens of some heads, for attention alone.

    before    rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7
    between   rank 0: tokens 0-7, heads 0-3      rank 1: tokens 0-7, heads 4-7

One all-to-all exchanges queries, keys and values, another the output; backward is the same in reverse. A rank needs
full heads. Key-value heads that the ranks do not divide are replicated to every rank that has a query of theirs.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.parallel.comm.mesh_axis import MeshAxis


def shard_heads(q: Tensor, k: Tensor, v: Tensor, axis: MeshAxis) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [B, heads, T, head_dim] of a rank's tokens to [B, heads / ranks, ranks x T, head_dim]."""
    if q.shape[1] % axis.size:
        legal = ", ".join(str(n) for n in range(1, q.shape[1] + 1) if q.shape[1] % n == 0)
        raise ValueError(
            f"{axis.size} ranks that exchange heads do not divide the {q.shape[1]} heads of an attention; "
            f"use one of {legal}, or cp_kind=ring"
        )
    copies = lcm(axis.size, k.shape[1]) // k.shape[1]
    parts = (q, k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1))
    # The heads of one rank after the other, so that all three are one all-to-all.
    per_rank = [part.unflatten(1, (axis.size, -1)) for part in parts]
    together = _HeadAllToAll.apply(torch.cat(per_rank, dim=2).flatten(1, 2), axis, True)
    found = together.split([part.shape[2] for part in per_rank], dim=1)
    return found[0], found[1], found[2]


def unshard_heads(y: Tensor, axis: MeshAxis) -> Tensor:
    """Exchange the output back."""
    found: Tensor = _HeadAllToAll.apply(y, axis, False)
    return found


class _HeadAllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, to_heads: bool) -> Tensor:
        ctx.axis, ctx.to_heads = axis, to_heads
        return _tokens_for_heads(x, axis) if to_heads else _heads_for_tokens(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exchange = _heads_for_tokens if ctx.to_heads else _tokens_for_heads
        return exchange(gradients[0], ctx.axis), None, None


def _tokens_for_heads(x: Tensor, axis: MeshAxis) -> Tensor:
    sent = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    axis.start_all_to_all(received, sent).wait()
    return received.movedim(0, 2).flatten(2, 3)


def _heads_for_tokens(x: Tensor, axis: MeshAxis) -> Tensor:
    sent = x.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    axis.start_all_to_all(received, sent).wait()
    return received.movedim(0, 1).flatten(1, 2)
