"""How activations [sequences, positions, columns] are sharded on a grid: by sequences and by columns.

A batch that the grid does not divide is padded at the end. Padding is token 0 without a target: it never meets another
sequence, and its loss and gradients are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.layout.placement import DimSplit
from echelon.parallel.comm.mesh_axis import MeshAxis


@dataclass(frozen=True)
class ActivationSharding:
    """The axes over which sequences and columns are sharded."""

    batch_axis: MeshAxis
    """the axis over which the microbatch's sequences are sharded"""
    column_axis: MeshAxis
    """the axis over which the last dimension is sharded"""

    def column_split(self, dim: int) -> DimSplit:
        """Return the split of a parameter's dimension that follows the columns."""
        return DimSplit(axis=self.column_axis.name, dim=dim, num_parts=self.column_axis.size)

    def local_batch(self, batch: int) -> int:
        """Return the sequences of a batch on each rank, padding included."""
        return -(-batch // self.batch_axis.size)

    def sequence_index(self, local_batch: int, batch: int, device: torch.device) -> Tensor:
        """Return the indices of this rank's sequences in the microbatch; padding repeats the last one."""
        first = self.batch_axis.index * local_batch
        return torch.arange(first, first + local_batch, device=device).clamp_(max=batch - 1)

    def local_sequences(self, x: Tensor, padding: int) -> Tensor:
        """Return this rank's sequences of a tensor that every rank holds."""
        count = self.local_batch(len(x))
        return padded_slice(x, self.batch_axis.index * count, count, padding)


def padded_slice(x: Tensor, first: int, count: int, padding: int) -> Tensor:
    """Return x[first : first + count], padded beyond the end of x."""
    part = x[first : first + count]
    missing = count - len(part)
    return torch.cat([part, part.new_full((missing, *x.shape[1:]), padding)]) if missing else part
