"""Where activations lie on a grid: [sequences, positions, columns], divided by sequences and by columns.

A number of sequences that the grid does not divide is padded at the end. Padding is token 0 without a target: what is
computed of it meets no other sequence, and its loss and gradients are nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.parallel.comm.mesh_axis import MeshAxis


@dataclass(frozen=True)
class ActivationSharding:
    batch_axis: MeshAxis
    """the axis over which the microbatch's sequences are divided"""
    column_axis: MeshAxis
    """the axis over which the last dimension is"""

    def local_batch(self, batch: int) -> int:
        """How many of so many sequences each rank has, padding included."""
        return -(-batch // self.batch_axis.size)

    def sequence_index(self, local_batch: int, batch: int, device: torch.device) -> Tensor:
        """Which sequences of the microbatch this rank's are; padding repeats the last one."""
        first = self.batch_axis.index * local_batch
        return torch.arange(first, first + local_batch, device=device).clamp_(max=batch - 1)

    def local_sequences(self, x: Tensor, padding: int) -> Tensor:
        """This rank's sequences of a tensor that every rank holds."""
        here = self.local_batch(len(x))
        return padded_slice(x, self.batch_axis.index * here, here, padding)


def padded_slice(x: Tensor, first: int, count: int, padding: int) -> Tensor:
    """x[first : first + count]; what lies beyond the end of x is padding."""
    part = x[first : first + count]
    missing = count - len(part)
    return torch.cat([part, part.new_full((missing, *x.shape[1:]), padding)]) if missing else part
