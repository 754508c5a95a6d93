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

from echelon.kernels.attention.blockwise_attention import accumulate_, accumulation_dtype
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.cp.block_attention import BlockwiseBackward, BlockwiseForward, MaskSpec, copy_if_shared
from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder

TOKEN_DIM = 3
"""the dimension of tokens in keys and values [2, B, H, T, head_dim]"""


class AllGatherAttention:
    """One rank's place among those that gather, for sequences of one length."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.sequence_positions = torch.arange(order.padded_len, device=device)
        each = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions, self.gathered_positions = each[axis.index], torch.cat(each)
        """where each gathered token is in the sequence"""
        self.inverse = self.gathered_positions.argsort()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        q = copy_if_shared(q, k)
        out: Tensor = _AllGatherAttentionFunction.apply(q, torch.stack((k, v)), self, mask)
        return out

    @property
    def blocks(self) -> Iterator[AttentionBlock]:
        return self.order.gathered_blocks(self.axis.index, causal=self.causal)

    def gather_kv(self, kv: Tensor) -> Tensor:
        """All keys and values, in the sequence's order."""
        gathered = kv.new_empty(self.axis.size, *kv.shape)
        self.axis.start_all_gather(gathered.view(-1), kv.contiguous().view(-1)).wait()
        together = gathered.movedim(0, TOKEN_DIM).flatten(TOKEN_DIM, TOKEN_DIM + 1)
        return together.index_select(TOKEN_DIM, self.inverse)

    def reduce_scatter_grads(self, grads: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' gradients of all keys and values."""
        parts = grads.index_select(TOKEN_DIM, self.gathered_positions).unflatten(TOKEN_DIM, (self.axis.size, -1))
        sent = parts.movedim(TOKEN_DIM, 0).contiguous()
        mine = torch.empty_like(sent[0])
        self.axis.start_reduce_scatter(mine.view(-1), sent.view(-1)).wait()
        return mine


class _AllGatherAttentionFunction(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, gather: AllGatherAttention, marks: MaskSpec) -> Tensor:
        ctx.gather, ctx.mask = gather, marks
        k, v = gather.gather_kv(kv)
        queries = BlockwiseForward(q, marks)
        for block in gather.blocks:
            queries.add_block(block, k, v, gather.sequence_positions)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        gather: AllGatherAttention = ctx.gather
        k, v = whole = gather.gather_kv(kv)
        found = BlockwiseBackward(gradients[0], q, out, lse, ctx.mask)
        total = torch.zeros_like(whole, dtype=accumulation_dtype(kv.dtype))
        for block in gather.blocks:
            for sums, part in zip(total, found.add_block(block, k, v, gather.sequence_positions), strict=True):
                accumulate_(sums[:, :, block.keys], part)
        return found.dq.result(), gather.reduce_scatter_grads(total).to(kv.dtype), None, None
