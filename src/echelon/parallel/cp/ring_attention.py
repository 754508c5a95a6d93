"""Ring attention: keys and values go around the ranks, and each rank attends to the current ones while the next arrive.

[Note: once around]

    step        0         1         2        ranks 0, 1, 2 of a ring; at each step a rank sends its current keys and
    rank 0    kv 0      kv 2      kv 1       values to the next rank, and attends to them meanwhile (zigzag.py says
    rank 1    kv 1      kv 0      kv 2       which of its queries attend to which)
    rank 2    kv 2      kv 1      kv 0

Forward merges the steps' partial softmaxes (kernels/attention/blockwise_attention.py). That is the flash form of the
ring self-attention of 2021, which sent the same bytes but saved a row of scores as long as the sequence per token. Here
backward saves only a rank's own queries, keys, values and output.

Backward sends keys and values around again. A rank sends its partial gradients of them straight back to their owner,
while it attends to the next block; there they accumulate in 32 bits or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.attention.blockwise_attention import GradientAccumulator
from echelon.parallel.comm.mesh_axis import MeshAxis, PendingWork
from echelon.parallel.cp.block_attention import BlockwiseBackward, BlockwiseForward, MaskSpec, copy_if_shared
from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder


class RingAttention:
    """One rank's ring attention, for sequences of one length."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.positions = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions = self.positions[axis.index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        q = copy_if_shared(q, k)
        out: Tensor = _RingAttentionFunction.apply(q, torch.stack((k, v)), self, mask)
        return out

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """Yield (block, keys and values, their positions) of every step; the next ones arrive during the block."""
        size, rank = self.axis.size, self.axis.index
        for step in range(size):
            key_rank = (rank - step) % size
            if step < size - 1:
                arriving = torch.empty_like(kv)
                pending = self.axis.start_shift(arriving, kv)
            yield self.order.block(rank, key_rank, causal=self.causal), kv, self.positions[key_rank]
            if step < size - 1:
                pending.wait()
                kv = arriving


class _RingAttentionFunction(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingAttention, mask: MaskSpec) -> Tensor:
        ctx.ring, ctx.mask = ring, mask
        queries = BlockwiseForward(q, mask)
        for block, (k, v), positions in ring.kv_blocks(kv):
            queries.add_block(block, k, v, positions)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        backward, kv_grads = BlockwiseBackward(gradients[0], q, out, lse, ctx.mask), KeyValueGrads(ring, kv)
        for step, (block, (k, v), positions) in enumerate(ring.kv_blocks(kv)):
            parts = backward.add_block(block, k, v, positions)
            if step:
                kv_grads.send(step, parts)
            else:
                kv_grads.add(block.keys, parts)
        return backward.dq.result(), kv_grads.result(), None, None


class KeyValueGrads:
    """The gradients of a rank's keys and values, to which every rank contributes."""

    def __init__(self, ring: RingAttention, kv: Tensor):
        self.ring, self.kv = ring, kv
        self.totals = [GradientAccumulator(x) for x in kv]
        self._receiving: tuple[slice, Tensor, Tensor, PendingWork] | None = None

    def add(self, keys: slice, parts: Iterable[Tensor]) -> None:
        for total, part in zip(self.totals, parts, strict=True):
            total.add(keys, part)

    def send(self, step: int, parts: tuple[Tensor, Tensor]) -> None:
        """Send partial gradients back `step` ranks, to the owner of the keys, and receive those of this rank's keys.

        Compute of one block overlaps each transfer.
        """
        self._receive()
        axis, order = self.ring.axis, self.ring.order
        sent = torch.stack(parts)
        keys = order.block((axis.index + step) % axis.size, axis.index, causal=self.ring.causal).keys
        received = torch.empty_like(self.kv[:, :, :, keys])
        self._receiving = keys, received, sent, axis.start_shift(received, sent, offset=-step)

    def _receive(self) -> None:
        if self._receiving is not None:
            keys, received, _, pending = self._receiving
            pending.wait()
            self.add(keys, received)
            self._receiving = None

    def result(self) -> Tensor:
        self._receive()
        return torch.stack([total.result() for total in self.totals])
