"""How a dense tensor lies in memory: rows, one for each sample, blocks of a row, and chunks of it for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256
"""elements that share a scale, or a number of those that are not zero; a row begins a block of its own, so that a
sample is rounded alike in every batch"""
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
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x.numel() > 0  # most are, and torch knows it
    return dense(x) and (x.dim() < 2 or x.shape[0] == 1 or x.stride(0) == x.numel() // x.shape[0])


def rows_of(x: Tensor) -> Tensor:
    """[rows, elements of each] as they lie: a sample is a row; a tensor of one dimension is one row."""
    rows = x.shape[0] if x.dim() > 1 else 1
    return x.as_strided((rows, x.numel() // rows), (x.numel() // rows, 1))


@dataclass(frozen=True)
class Cut:
    """How a row is cut for our kernels."""

    chunk: int
    """elements of a program"""
    chunks: int
    block: int
    """elements that share a scale"""
    blocks: int


@lru_cache(maxsize=4096)  # asked for at every launch
def cut(row: int) -> Cut:
    chunk = min(CHUNK, max(16, 1 << (row - 1).bit_length()))
    return Cut(chunk, -(-row // chunk), min(BLOCK, chunk), -(-row // BLOCK))


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
