"""All-gather attention: every rank gathers the keys and values of the full sequence, and attends with its own queries.

It is one exposed collective instead of a ring's many overlapped sends. Backward gathers keys and values again instead
of saving them, so that saved memory falls with cp as a ring's does, and reduce-scatters their gradients. Tokens are in
zigzag order (zigzag.py); keys and values are reordered to the sequence's, so that a query attends to one contiguous
range and a square with a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels.attention.blockwise_attention import accumulate_, accumulation_dtype
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.cp.cp_attention import ContextParallelAttention
from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder

TOKEN_DIM = 3
"""the dimension of tokens in keys and values [2, B, H, T, head_dim]"""


class AllGatherAttention(ContextParallelAttention):
    """Attention to keys and values that are gathered over `axis`."""

    def __init__(
        self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device, window: int | None = None
    ):
        self.axis, self.order, self.causal, self.window = axis, order, causal, window
        self.sequence_positions = torch.arange(order.padded_len, device=device)
        each = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions, self.gathered_positions = each[axis.index], torch.cat(each)
        """position of each gathered token in the sequence"""
        self.inverse = self.gathered_positions.argsort()

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """Gather all keys and values, in the sequence's order, and yield the blocks that the queries attend to."""
        full = self._gather(kv)
        for block in self.order.gathered_blocks(self.axis.index, causal=self.causal, window=self.window):
            yield block, full, self.sequence_positions

    def _gather(self, kv: Tensor) -> Tensor:
        # A function of its own: a generator would hold the gathered copy until its last block.
        gathered = self.axis.all_gather(kv).movedim(0, TOKEN_DIM).flatten(TOKEN_DIM, TOKEN_DIM + 1)
        return gathered.index_select(TOKEN_DIM, self.inverse)

    def kv_grads(self, kv: Tensor) -> GatheredKeyValueGrads:
        return GatheredKeyValueGrads(self, kv)


class GatheredKeyValueGrads:
    """Partial gradients of the full sequence, which are reduce-scattered at the end."""

    def __init__(self, attention: AllGatherAttention, kv: Tensor):
        self.attention, self.dtype = attention, kv.dtype
        shape = (*kv.shape[:TOKEN_DIM], attention.order.padded_len, *kv.shape[TOKEN_DIM + 1 :])
        self.total = kv.new_zeros(shape, dtype=accumulation_dtype(kv.dtype))

    def add(self, step: int, block: AttentionBlock, parts: Sequence[Tensor]) -> None:
        for total, part in zip(self.total, parts, strict=True):
            accumulate_(total[:, :, block.keys], part)

    def result(self) -> Tensor:
        axis, positions = self.attention.axis, self.attention.gathered_positions
        parts = self.total.index_select(TOKEN_DIM, positions).unflatten(TOKEN_DIM, (axis.size, -1))
        sent = parts.movedim(TOKEN_DIM, 0).contiguous()
        local = torch.empty_like(sent[0])
        axis.start_reduce_scatter(local.view(-1), sent.view(-1)).wait()
        return local.to(self.dtype)
