"""Context by all-gather: every rank gets the keys and values of the whole sequence, and attends with its own queries.

One message instead of a ring's many, and nothing hides it. Backward gathers them again instead of keeping them, so that
what is kept falls with cp as a ring's does, and scatters their gradients. Tokens lie in zigzag (zigzag.py); keys and
values are put into the sequence's order, so that a query sees one run of them and a square with a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.attention.blockwise_attention import add_, wide
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.cp.block_attention import Gradients, Marks, Queries, own
from echelon.parallel.cp.zigzag import Block, Zigzag

TOKENS = 3
"""the dimension of tokens in keys and values [2, B, H, T, head_dim]"""


class Gather:
    """One rank's place among those that gather, for sequences of one length."""

    def __init__(self, axis: Axis, order: Zigzag, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.natural = torch.arange(order.padded, device=device)
        each = [torch.tensor(order.group_places(member), device=device) for member in range(axis.size)]
        self.mine, self.places = each[axis.index], torch.cat(each)
        """where each gathered token is in the sequence"""
        self.inverse = self.places.argsort()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, marks: Marks) -> Tensor:
        q = own(q, k)
        out: Tensor = _Gathered.apply(q, torch.stack((k, v)), self, marks)
        return out

    @property
    def blocks(self) -> Iterator[Block]:
        return self.order.blocks_of_all(self.axis.index, causal=self.causal)

    def whole(self, kv: Tensor) -> Tensor:
        """All keys and values, in the sequence's order."""
        gathered = kv.new_empty(self.axis.size, *kv.shape)
        self.axis.start_all_gather(gathered.view(-1), kv.contiguous().view(-1)).wait()
        together = gathered.movedim(0, TOKENS).flatten(TOKENS, TOKENS + 1)
        return together.index_select(TOKENS, self.inverse)

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' gradients of all keys and values."""
        parts = whole.index_select(TOKENS, self.places).unflatten(TOKENS, (self.axis.size, -1))
        sent = parts.movedim(TOKENS, 0).contiguous()
        mine = torch.empty_like(sent[0])
        self.axis.start_reduce_scatter(mine.view(-1), sent.view(-1)).wait()
        return mine


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, gather: Gather, marks: Marks) -> Tensor:
        ctx.gather, ctx.marks = gather, marks
        k, v = gather.whole(kv)
        queries = Queries(q, marks)
        for block in gather.blocks:
            queries.see(block, k, v, gather.natural)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        gather: Gather = ctx.gather
        k, v = whole = gather.whole(kv)
        found = Gradients(gradients[0], q, out, lse, ctx.marks)
        total = torch.zeros_like(whole, dtype=wide(kv.dtype))
        for block in gather.blocks:
            for sums, part in zip(total, found.see(block, k, v, gather.natural), strict=True):
                add_(sums[:, :, block.keys], part)
        return found.dq.result(), gather.scattered(total).to(kv.dtype), None, None
