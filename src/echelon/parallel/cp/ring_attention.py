"""Ring attention: keys and values go around, and every rank attends to those at hand while the next are on their way.

[Note: once around]

    step        0         1         2        ranks 0, 1, 2 of a ring; at each step a rank sends the keys and values
    rank 0    kv 0      kv 2      kv 1       that it has to the next rank, and meanwhile attends to them (zigzag.py
    rank 1    kv 1      kv 0      kv 2       says which of its queries see which)
    rank 2    kv 2      kv 1      kv 0

Forward merges what the steps give by their partial softmaxes (kernels/attention/blockwise_attention.py). That is the flash form of the ring
self-attention of 2021, which sent the same bytes but kept a row of scores as long as the sequence for each token. Here
a rank's own queries, keys, values and result are all that is kept for backward.

Backward sends keys and values around again. What a rank finds of their gradients goes straight home, as many steps back
as they have come, while the next block is at work; there the parts add up in 32 bits or more.
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
    """One rank's place in a ring, for sequences of one length."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.positions = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions = self.positions[axis.index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        q = copy_if_shared(q, k)
        out: Tensor = _RingAttentionFunction.apply(q, torch.stack((k, v)), self, mask)
        return out

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """(block, keys and values, where they are) of every step; the next ones travel while a block is at work."""
        size, mine = self.axis.size, self.axis.index
        for step in range(size):
            theirs = (mine - step) % size
            if step < size - 1:
                arriving = torch.empty_like(kv)
                pending = self.axis.start_shift(arriving, kv)
            yield self.order.block(mine, theirs, causal=self.causal), kv, self.positions[theirs]
            if step < size - 1:
                pending.wait()
                kv = arriving


class _RingAttentionFunction(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingAttention, marks: MaskSpec) -> Tensor:
        ctx.ring, ctx.mask = ring, marks
        queries = BlockwiseForward(q, marks)
        for block, (k, v), places in ring.kv_blocks(kv):
            queries.add_block(block, k, v, places)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        found, home = BlockwiseBackward(gradients[0], q, out, lse, ctx.mask), KeyValueGrads(ring, kv)
        for step, (block, (k, v), places) in enumerate(ring.kv_blocks(kv)):
            parts = found.add_block(block, k, v, places)
            if step:
                home.send(step, parts)
            else:
                home.add(block.keys, parts)
        return found.dq.result(), home.result(), None, None


class KeyValueGrads:
    """The gradients of a rank's own keys and values, to which every rank has a part."""

    def __init__(self, ring: RingAttention, kv: Tensor):
        self.ring, self.kv = ring, kv
        self.totals = [GradientAccumulator(x) for x in kv]
        self._receiving: tuple[slice, Tensor, Tensor, PendingWork] | None = None

    def add(self, keys: slice, parts: Iterable[Tensor]) -> None:
        for total, part in zip(self.totals, parts, strict=True):
            total.add(keys, part)

    def send(self, step: int, parts: tuple[Tensor, Tensor]) -> None:
        """Parts of the gradients of what came `step` steps go back there; those of as many steps on are on their way.

        What was sent a step ago had a block's time to arrive.
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
