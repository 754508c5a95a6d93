"""Where activations lie on a grid: [sequences, positions, columns], divided by sequences and by columns.

A number of sequences that the grid does not divide is padded at the end. Padding is token 0 without a target: what is
computed of it meets no other sequence, and its loss and gradients are nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.parallel.comm.mesh_axis import Axis


@dataclass(frozen=True)
class Side:
    rows: Axis
    """the axis over which the microbatch's sequences are divided"""
    columns: Axis
    """the axis over which the last dimension is"""

    def rows_here(self, whole: int) -> int:
        """How many of so many sequences each rank has, padding included."""
        return -(-whole // self.rows.size)

    def index(self, here: int, whole: int, device: torch.device) -> Tensor:
        """Which sequences of the microbatch this rank's are; padding repeats the last one."""
        first = self.rows.index * here
        return torch.arange(first, first + here, device=device).clamp_(max=whole - 1)

    def cut(self, x: Tensor, padding: int) -> Tensor:
        """This rank's sequences of a tensor that every rank holds."""
        here = self.rows_here(len(x))
        return taken(x, self.rows.index * here, here, padding)


def taken(x: Tensor, first: int, count: int, padding: int) -> Tensor:
    """x[first : first + count]; what lies beyond the end of x is padding."""
    part = x[first : first + count]
    missing = count - len(part)
    return torch.cat([part, part.new_full((missing, *x.shape[1:]), padding)]) if missing else part
