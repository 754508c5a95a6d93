"""Ring attention: keys and values go around, and every rank attends to those at hand while the next are on their way.

[Note: once around]

    step        0         1         2        ranks 0, 1, 2 of a ring; at each step a rank sends the keys and values
    rank 0    kv 0      kv 2      kv 1       that it has to the next rank, and meanwhile attends to them (zigzag.py
    rank 1    kv 1      kv 0      kv 2       says which of its queries see which)
    rank 2    kv 2      kv 1      kv 0

Forward merges what the steps give by their partial softmaxes (kernels/blocks.py). That is the flash form of the ring
self-attention of 2021, which sent the same bytes but kept a row of scores as long as the sequence for each token. Here
a rank's own queries, keys, values and result are all that is kept for backward.

Backward sends keys and values around again, and one step behind them the gradients that they have collected so far:
rank i adds its part to those of kv i - s at step s and passes them on, so that after the last step they arrive at home.
They add up in 32 bits or more, and travel so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.blocks import wide
from echelon.parallel.axis import Axis
from echelon.parallel.reach import Gradients, Marks, Queries
from echelon.parallel.zigzag import Block, Zigzag


class Ring:
    """One rank's place in a ring, for sequences of one length."""

    def __init__(self, axis: Axis, order: Zigzag, *, causal: bool, device: torch.device):
        self.axis, self.order, self.causal = axis, order, causal
        self.places = [torch.tensor(order.group_places(member), device=device) for member in range(axis.size)]
        self.mine = self.places[axis.index]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, marks: Marks) -> Tensor:
        out: Tensor = _Around.apply(q, torch.stack((k, v)), self, marks)
        return out

    def arrivals(self, kv: Tensor) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """(block, keys and values, where they are) of every step; the next ones travel while a block is at work."""
        size, mine = self.axis.size, self.axis.index
        for step in range(size):
            theirs = (mine - step) % size
            if step < size - 1:
                arriving = torch.empty_like(kv)
                pending = self.axis.start_shift(arriving, kv)
            yield self.order.block(mine, theirs, causal=self.causal), kv, self.places[theirs]
            if step < size - 1:
                pending.wait()
                kv = arriving


class _Around(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: Ring, marks: Marks) -> Tensor:
        ctx.ring, ctx.marks = ring, marks
        queries = Queries(q, marks)
        for block, (k, v), places in ring.arrivals(kv):
            queries.see(block, k, v, places)
        out, lse = queries.merged.result()
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        found = Gradients(gradients[0], q, out, lse, ctx.marks)
        home = torch.zeros_like(kv, dtype=wide(kv.dtype))
        arriving, pending = home, None
        for step, (block, (k, v), places) in enumerate(ring.arrivals(kv)):
            parts = found.see(block, k, v, places)
            total = home if step == 0 else torch.zeros_like(home) if pending is None else arriving
            if pending is not None:
                pending.wait()
            for whole, part in zip(total, parts, strict=True):
                whole[:, :, block.keys] += part
            if step:
                arriving = torch.empty_like(home)
                pending = ring.axis.start_shift(arriving, total)
        if pending is not None:
            pending.wait()
            home += arriving
        return found.dq.to(q.dtype), home.to(kv.dtype), None, None
