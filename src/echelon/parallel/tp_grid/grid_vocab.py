"""Embedding and language head on a grid: table, hidden states and logits are all divided in two dimensions.

The loss is that of vocabulary.py, over slices of the vocabulary along one axis and for a rank's own sequences: sums of
losses and numbers of targets are then added over the axes of sequences, as they are over dp. What vocabulary.py says of
a vocabulary that does not divide holds here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels.layers.cross_entropy import IGNORED
from echelon.parallel.comm.mesh_axis import Axis
from echelon.parallel.tp.vocab_parallel import sliced_losses
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.parallel.tp_grid.grid_activations import Side
from echelon.parallel.tp_grid.grid_linear import Product, multiply


class LookUp(Protocol):
    """Rows of a table in blocks, of which each rank holds one."""

    def ids(self, ids: Tensor) -> Tensor:
        """The tokens that this rank looks up, of all of a microbatch."""
        ...

    def forward(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """[sequences here, positions, columns here]; the whole table has `size` rows."""
        ...

    def backward(self, dy: Tensor, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """The gradient of this rank's part of the table."""
        ...


class GridEmbedding(nn.Module):
    """Every rank is given all tokens, and has its own sequences and columns of what is looked up."""

    def __init__(self, weight: nn.Parameter, look_up: LookUp, size: int, cost: tp_grid_cost.Table):
        super().__init__()
        self.weight, self.look_up, self.size, self.cost = weight, look_up, size, cost

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = _LookUp.apply(self.weight, self.look_up.ids(ids), self.look_up, self.size)
        return out


class GridHead(nn.Module):
    """The language head: hidden states to (loss sum, count) of this rank's sequences."""

    def __init__(self, weight: nn.Parameter, product: Product, side: Side, vocabulary: int, cost: tp_grid_cost.Head):
        super().__init__()
        self.weight, self.product, self.side = weight, product, side
        self.vocabulary, self.cost = vocabulary, cost

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank is given all targets."""
        mine = self.side.cut(targets, IGNORED)
        losses = sliced_losses(self._slice(hidden), mine, self.side.columns, self.vocabulary)
        return losses.sum(), (mine != IGNORED).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits of all sequences, padding too, gathered: for text samples, not for training."""
        columns = torch.cat(_everyone(self.side.columns, self._slice(hidden.to(self.weight.dtype))).unbind(0), dim=-1)
        return _everyone(self.side.rows, columns).flatten(0, 1)[..., : self.vocabulary]

    def _slice(self, hidden: Tensor) -> Tensor:
        return multiply(hidden, [self.weight], self.product, [self.cost.rows], hidden.shape[-1])[0]


class _LookUp(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, look_up: LookUp, size: int) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.look_up, ctx.size = look_up, size
        return look_up.forward(ids, table, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        table, ids = ctx.saved_tensors
        return ctx.look_up.backward(gradients[0], ids, table, ctx.size), None, None, None


def places(ids: Tensor, first: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """(place among the rows first .. first + count - 1 of a table, or 0; whether the row is elsewhere).

    An id that is no row of the table is not hidden: it has a place where there is none.
    """
    local = ids - first
    elsewhere = ((local < 0) | (local >= count)) & (ids >= 0) & (ids < size)
    return local.masked_fill(elsewhere, 0), elsewhere


def _everyone(axis: Axis, part: Tensor) -> Tensor:
    """[ranks of the axis, *part.shape]"""
    whole = part.new_empty(axis.size, *part.shape)
    axis.start_all_gather(whole.view(-1), part.reshape(-1)).wait()
    return whole
