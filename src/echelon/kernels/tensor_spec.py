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


def is_dense(x: Tensor) -> bool:
    """Every element has a place of its own, without gaps."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0


def is_dense_by_sample(x: Tensor) -> bool:
    """Dense, and samples (dim 0) lie one after another."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x.numel() > 0  # most are, and torch knows it
    return is_dense(x) and (x.dim() < 2 or x.shape[0] == 1 or x.stride(0) == x.numel() // x.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """[rows, elements of each] as they lie: a sample is a row; a tensor of one dimension is one row."""
    rows = x.shape[0] if x.dim() > 1 else 1
    return x.as_strided((rows, x.numel() // rows), (x.numel() // rows, 1))


@dataclass(frozen=True)
class RowSplit:
    """How a row is cut for our kernels."""

    chunk_size: int
    """elements of a program"""
    num_chunks: int
    block_size: int
    """elements that share a scale"""
    num_blocks: int


@lru_cache(maxsize=4096)  # asked for at every launch
def split_row(row_size: int) -> RowSplit:
    chunk = min(CHUNK, max(16, 1 << (row_size - 1).bit_length()))
    return RowSplit(chunk, -(-row_size // chunk), min(BLOCK, chunk), -(-row_size // BLOCK))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor but for its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensor(cls, x: Tensor) -> TensorSpec:
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def match_strides(self, x: Tensor) -> Tensor:
        """x, lying so."""
        return x if x.stride() == self.stride else self.empty().to(x.dtype).copy_(x)
