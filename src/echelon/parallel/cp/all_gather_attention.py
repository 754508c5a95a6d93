"""All-gather attention: every rank gathers the keys and values of the full sequence, and attends with its own queries.

It is one exposed collective instead of a ring's many overlapped sends. Backward gathers keys and values again instead
of saving them, so that saved memory falls with cp as a ring's does, and reduce-scatters their gradients. Tokens are in
zigzag order (zigzag.py); keys and values are reordered to the sequence's, so that a query attends to one contiguous
range and a square with a causal mask.
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
    """One rank's all-gather attention, for sequences of one length."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.sequence_positions = torch.arange(order.padded_len, device=device)
        each = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions, self.gathered_positions = each[axis.index], torch.cat(each)
        """position of each gathered token in the sequence"""
        self.inverse = self.gathered_positions.argsort()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        q = copy_if_shared(q, k)
        out: Tensor = _AllGatherAttentionFunction.apply(q, torch.stack((k, v)), self, mask)
        return out

    @property
    def blocks(self) -> Iterator[AttentionBlock]:
        return self.order.gathered_blocks(self.axis.index, causal=self.causal)

    def gather_kv(self, kv: Tensor) -> Tensor:
        """Return all keys and values, in the sequence's order."""
        gathered = self.axis.all_gather(kv).movedim(0, TOKEN_DIM).flatten(TOKEN_DIM, TOKEN_DIM + 1)
        return gathered.index_select(TOKEN_DIM, self.inverse)

    def reduce_scatter_grads(self, grads: Tensor) -> Tensor:
        """Return this rank's part of the summed gradients of all keys and values."""
        parts = grads.index_select(TOKEN_DIM, self.gathered_positions).unflatten(TOKEN_DIM, (self.axis.size, -1))
        sent = parts.movedim(TOKEN_DIM, 0).contiguous()
        local = torch.empty_like(sent[0])
        self.axis.start_reduce_scatter(local.view(-1), sent.view(-1)).wait()
        return local


class _AllGatherAttentionFunction(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, attention: AllGatherAttention, mask: MaskSpec) -> Tensor:
        ctx.attention, ctx.mask = attention, mask
        k, v = attention.gather_kv(kv)
        queries = BlockwiseForward(q, mask)
        for block in attention.blocks:
            queries.add_block(block, k, v, attention.sequence_positions)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        attention: AllGatherAttention = ctx.attention
        k, v = full = attention.gather_kv(kv)
        backward = BlockwiseBackward(gradients[0], q, out, lse, ctx.mask)
        total = torch.zeros_like(full, dtype=accumulation_dtype(kv.dtype))
        for block in attention.blocks:
            for sums, part in zip(total, backward.add_block(block, k, v, attention.sequence_positions), strict=True):
                accumulate_(sums[:, :, block.keys], part)
        return backward.dq.result(), attention.reduce_scatter_grads(total).to(kv.dtype), None, None
