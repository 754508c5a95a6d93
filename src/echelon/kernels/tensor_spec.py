"""Tensor specs (shape, strides, dtype, device), and how dense tensors are split into rows, chunks and blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from echelon.kernels.memory_limits import SCALE_BLOCK

CHUNK = 2048
"""elements of a row that one program processes"""


def is_dense(x: Tensor) -> bool:
    """Return whether x covers its memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0


def is_dense_by_sample(x: Tensor) -> bool:
    """Return whether x is dense and its samples (dim 0) follow one another in memory."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x.numel() > 0  # the common case, which torch knows
    return is_dense(x) and (x.dim() < 2 or x.shape[0] == 1 or x.stride(0) == x.numel() // x.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """View x as [rows, elements] in memory order: a sample is a row; a 1-d tensor is one row."""
    rows = x.shape[0] if x.dim() > 1 else 1
    return x.as_strided((rows, x.numel() // rows), (x.numel() // rows, 1))


@dataclass(frozen=True)
class RowSplit:
    """A row split into chunks for programs, and blocks that share a scale. Every row starts a new block."""

    size: int
    chunk_size: int
    num_chunks: int
    block_size: int
    num_blocks: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """`row, chunks, blocks` of the kernels."""
        return self.size, self.num_chunks, self.num_blocks

    @property
    def constants(self) -> dict[str, int]:
        return {"CHUNK": self.chunk_size, "SIZE": self.block_size}


@lru_cache(maxsize=4096)  # called at every launch
def split_row(row_size: int) -> RowSplit:
    """Split a row of `row_size` elements."""
    chunk = min(CHUNK, max(16, 1 << (row_size - 1).bit_length()))
    return RowSplit(row_size, chunk, -(-row_size // chunk), min(SCALE_BLOCK, chunk), -(-row_size // SCALE_BLOCK))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

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
        """Return x with this spec's strides: x itself, or a copy."""
        return x if x.stride() == self.stride else self.empty().to(x.dtype).copy_(x)
