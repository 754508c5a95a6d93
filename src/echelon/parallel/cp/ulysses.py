"""Ulysses: an all-to-all turns some tokens of all heads into all tokens of some heads, for attention alone.

    before    rank 0: tokens 0-3, heads 0-7      rank 1: tokens 4-7, heads 0-7
    between   rank 0: tokens 0-7, heads 0-3      rank 1: tokens 0-7, heads 4-7

One all-to-all exchanges queries, keys and values, another the output; backward is the same in reverse. A rank needs
full heads. Key-value heads that the ranks do not divide are replicated to every rank that has a query of theirs.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis

HEADS, TOKENS = 1, 2
"""dimensions of [B, heads, T, head_dim]"""


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
    exchanged = _all_to_all(torch.cat(per_rank, dim=2).flatten(1, 2), axis, HEADS, TOKENS)
    q, k, v = exchanged.split([part.shape[2] for part in per_rank], dim=1)
    return q, k, v


def unshard_heads(y: Tensor, axis: MeshAxis) -> Tensor:
    """Exchange the output back."""
    return _all_to_all(y, axis, TOKENS, HEADS)


def _all_to_all(x: Tensor, axis: MeshAxis, split_dim: int, join_dim: int) -> Tensor:
    """Split one dimension over the ranks, and join the parts of another that they send."""

    def exchange(x: Tensor, split_dim: int, join_dim: int) -> Tensor:
        sent = x.unflatten(split_dim, (axis.size, -1)).movedim(split_dim, 0).contiguous()
        received = torch.empty_like(sent)
        axis.start_all_to_all(received, sent).wait()
        return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)

    return with_backward(x, lambda x: exchange(x, split_dim, join_dim), lambda dy: exchange(dy, join_dim, split_dim))
