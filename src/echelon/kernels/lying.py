"""How a dense tensor lies in memory: rows, one for each sample, and chunks of a row, one for each program."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2048
"""elements of a row that a program takes"""


def dense(x: Tensor) -> bool:
    """Every element has a place of its own, without gaps."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0


def in_rows(x: Tensor) -> bool:
    """Dense, and samples (dim 0) lie one after another."""
    return dense(x) and (x.dim() < 2 or x.shape[0] == 1 or x.stride(0) == x.numel() // x.shape[0])


def rows_of(x: Tensor) -> Tensor:
    """[rows, elements of each] as they lie: a sample is a row; a tensor of one dimension is one row."""
    rows = x.shape[0] if x.dim() > 1 else 1
    return x.as_strided((rows, x.numel() // rows), (x.numel() // rows, 1))


def chunk_of(row: int) -> int:
    """Elements of a program, where a row has so many."""
    return min(CHUNK, max(16, 1 << (row - 1).bit_length()))


def chunks_of(row: int) -> int:
    """Programs of a row."""
    return -(-row // chunk_of(row))


@dataclass(frozen=True)
class Lying:
    """A tensor but for its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Lying:
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def like(self, x: Tensor) -> Tensor:
        """x, lying so."""
        return x if x.stride() == self.stride else self.empty().to(x.dtype).copy_(x)
