"""Embedding and language head on a grid: table, hidden states and logits are all sharded in two dimensions.

The loss is the vocabulary-parallel cross-entropy (tp/vocab_cross_entropy.py) along one axis, for a rank's sequences:
sums of losses and token counts are then summed over the axes of sequences, as they are over dp.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.layers.cross_entropy import IGNORE_INDEX
from echelon.parallel.tp.vocab_cross_entropy import vocab_parallel_cross_entropy
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.parallel.tp_grid.grid_linear import grid_matmul
from echelon.parallel.tp_grid.matmul_3d import Grid3D
from echelon.parallel.tp_grid.summa import SummaGrid


class GridLookup(Protocol):
    """Lookup in a block-sharded table."""

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the tokens of a microbatch that this rank looks up."""

    def forward(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """Return [local sequences, positions, local columns]; the full table has `size` rows."""

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """Return the gradient of this rank's part of the table."""


class GridEmbedding(nn.Module):
    """The embedding: every rank gets all tokens, and returns its sequences and columns."""

    def __init__(self, weight: nn.Parameter, lookup: GridLookup, size: int, cost: tp_grid_cost.EmbeddingSizes):
        super().__init__()
        self.weight, self.lookup, self.size, self.cost = weight, lookup, size, cost

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = _GridLookupFunction.apply(self.weight, self.lookup.local_ids(ids), self.lookup, self.size)
        return out


class GridHead(nn.Module):
    """The language head: hidden states to (loss sum, count) of this rank's sequences."""

    def __init__(self, weight: nn.Parameter, grid: SummaGrid | Grid3D, vocab_size: int, cost: tp_grid_cost.HeadSizes):
        super().__init__()
        self.weight, self.vocab_size, self.cost = weight, vocab_size, cost
        self.matmul, self.sharding = grid.head_matmul(), grid.region

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss; every rank gets all targets."""
        local, axis = self.sharding.local_sequences(targets, IGNORE_INDEX), self.sharding.column_axis
        losses = vocab_parallel_cross_entropy(self._local_logits(hidden), local, axis, self.vocab_size)
        return losses.sum(), (local != IGNORE_INDEX).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits of all sequences, with padding, gathered: for text samples, not for training."""
        local = self._local_logits(hidden.to(self.weight.dtype))
        columns = torch.cat(self.sharding.column_axis.all_gather(local).unbind(0), dim=-1)
        return self.sharding.batch_axis.all_gather(columns).flatten(0, 1)[..., : self.vocab_size]

    def _local_logits(self, hidden: Tensor) -> Tensor:
        return grid_matmul(hidden, [self.weight], self.matmul, [self.cost.rows], hidden.shape[-1])[0]


class _GridLookupFunction(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, look_up: GridLookup, size: int) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.lookup, ctx.size = look_up, size
        return look_up.forward(ids, table, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        table, ids = ctx.saved_tensors
        return ctx.lookup.backward(gradients[0], ids, table, ctx.size), None, None, None
