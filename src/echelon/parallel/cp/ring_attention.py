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

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from echelon.kernels.attention.blockwise_attention import GradientAccumulator
from echelon.parallel.comm.mesh_axis import MeshAxis, PendingWork
from echelon.parallel.cp.cp_attention import ContextParallelAttention
from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder


class RingAttention(ContextParallelAttention):
    """Attention to keys and values that go around the ranks of `axis`."""

    def __init__(self, axis: MeshAxis, order: ZigzagOrder, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.positions = [torch.tensor(order.ring_positions(member), device=device) for member in range(axis.size)]
        self.local_positions = self.positions[axis.index]

    def kv_blocks(self, kv: Tensor) -> Iterator[tuple[AttentionBlock, Tensor, Tensor]]:
        """Yield the block of every step; the next keys and values arrive during the block."""
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

    def kv_grads(self, kv: Tensor) -> RingKeyValueGrads:
        return RingKeyValueGrads(self, kv)


class RingKeyValueGrads:
    """Partial gradients go straight back to the rank that holds the keys, and accumulate there."""

    def __init__(self, ring: RingAttention, kv: Tensor):
        self.ring, self.kv = ring, kv
        self.totals = [GradientAccumulator(x) for x in kv]
        self._receiving: tuple[slice, Tensor, Tensor, PendingWork] | None = None

    def add(self, step: int, block: AttentionBlock, parts: Sequence[Tensor]) -> None:
        """Send the gradients back `step` ranks, and receive those of this rank's keys; compute of a block overlaps."""
        if not step:
            self._accumulate(block.keys, parts)
            return
        self._receive()
        axis, order = self.ring.axis, self.ring.order
        sent = torch.stack(tuple(parts))
        keys = order.block((axis.index + step) % axis.size, axis.index, causal=self.ring.causal).keys
        received = torch.empty_like(self.kv[:, :, :, keys])
        self._receiving = keys, received, sent, axis.start_shift(received, sent, offset=-step)

    def _accumulate(self, keys: slice, parts: Iterable[Tensor]) -> None:
        for total, part in zip(self.totals, parts, strict=True):
            total.add(keys, part)

    def _receive(self) -> None:
        if self._receiving is not None:
            keys, received, _, pending = self._receiving
            pending.wait()
            self._accumulate(keys, received)
            self._receiving = None

    def result(self) -> Tensor:
        self._receive()
        return torch.stack([total.result() for total in self.totals])
