"""Attention under a window: a rank receives the keys and values that its queries reach, from the ranks that hold them.

A ring would send all of them past every rank. Here a rank sends each of the others only what that one attends to, while
it attends to what it has; ranks that reach no key of another exchange nothing with it (zigzag.py). Gradients go back
the same way, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from echelon.kernels.attention.blockwise_attention import GradientAccumulator
from echelon.parallel.comm.mesh_axis import MeshAxis, PendingWork
from echelon.parallel.cp.cp_attention import ContextParallelAttention
from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder


class WindowAttention(ContextParallelAttention):
    """Attention of each query to the last `window` tokens, over the ranks of `axis`."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, window: int, device: torch.device):
        self.axis, self.order, self.window = axis, order, window
        self.positions = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions = self.positions[axis.index]
        self.offsets = order.window_offsets(window)
        """how far before this rank on the axis are those that some rank receives from; the first is 0"""
        self.block_offsets = [
            offset
            for offset in self.offsets
            for _ in order.window_blocks(axis.index, (axis.index - offset) % axis.size, window)
        ]
        """how far before each block's keys are"""

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """Yield the blocks of every offset; the next keys and values arrive during its blocks."""
        rank, size = self.axis.index, self.axis.size
        arriving = kv
        pending: PendingWork | None = None
        for offset, following in pairwise((*self.offsets, 0)):
            if pending is not None:
                pending.wait()
            current, keys, key_rank = arriving, self.received_keys(offset), (rank - offset) % size
            if following:
                sent = kv[:, :, :, self.sent_keys(following)].contiguous()
                arriving = torch.empty_like(kv[:, :, :, self.received_keys(following)])
                pending = self.axis.start_shift(arriving, sent, offset=following)
            for block in self.order.window_blocks(rank, key_rank, self.window):
                received = slice(block.keys.start - keys.start, block.keys.stop - keys.start)
                yield replace(block, keys=received), current, self.positions[key_rank][keys]

    def sent_keys(self, offset: int) -> slice:
        """This rank's keys to which the rank `offset` further attends."""
        return self.order.window_keys((self.axis.index + offset) % self.axis.size, self.axis.index, self.window)

    def received_keys(self, offset: int) -> slice:
        """The keys of the rank `offset` before, to which this rank attends; of its own all."""
        return self.order.window_keys(self.axis.index, (self.axis.index - offset) % self.axis.size, self.window)

    def kv_grads(self, kv: Tensor) -> WindowKeyValueGrads:
        return WindowKeyValueGrads(self, kv)


class WindowKeyValueGrads:
    """Partial gradients of the keys and values of each rank, which go back to their owners at the end."""

    def __init__(self, attention: WindowAttention, kv: Tensor):
        self.attention, self.kv = attention, kv
        self.totals = {
            offset: [GradientAccumulator(x[:, :, attention.received_keys(offset)]) for x in kv]
            for offset in attention.offsets
        }

    def add(self, step: int, block: AttentionBlock, parts: Sequence[Tensor]) -> None:
        for total, part in zip(self.totals[self.attention.block_offsets[step]], parts, strict=True):
            total.add(block.keys, part)

    def result(self) -> Tensor:
        attention, local = self.attention, self.totals[0]
        for offset in attention.offsets[1:]:
            sent = torch.stack([total.result() for total in self.totals.pop(offset)])
            keys = attention.sent_keys(offset)
            arriving = torch.empty_like(self.kv[:, :, :, keys])
            attention.axis.start_shift(arriving, sent, offset=-offset).wait()
            for total, part in zip(local, arriving, strict=True):
                total.add(keys, part)
        return torch.stack([total.result() for total in local])
