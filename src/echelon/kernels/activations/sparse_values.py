"""Sparse values: only the nonzeros that a bitmask marks, packed, in their dtype or in a low-precision format.

The bitmask is ReLU's (bitmask.py). Scales belong to blocks of the dense tensor, zeros included, so a value is rounded
the same way whether its neighbours are stored or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask as packed
from echelon.kernels.activations.blockwise_cast import BlockFormat, decode_plain, empty_scales, encode_plain


@dataclass(frozen=True)
class SparseValues:
    """The packed nonzeros of a tensor."""

    values: Tensor
    """[number of set bits]"""
    scales: Tensor
    """[rows, blocks]; empty in fp16 and in the tensor's dtype"""
    block_ends: Tensor
    """where the values of each block end; for the Triton kernels only"""


@dataclass(frozen=True)
class NonzeroCount:
    """Number of set bits, copied asynchronously from the device; it decides the size of the allocation."""

    total: Tensor
    """on the CPU, valid once `ready` has completed"""
    block_ends: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> int:
        if self.ready is not None:
            self.ready.synchronize()
        return int(self.total)


def count_nonzero(bits: Tensor, counts: Tensor, row_size: int) -> NonzeroCount:
    """Count set bits, without synchronising with the device."""
    if counts.numel():
        wide = bits.numel() * 8 >= 1 << 31
        ends = counts.cumsum(0, dtype=torch.int64 if wide else torch.int32)
        total = ends[-1]
    else:
        ends, total = counts, packed.unpack_plain(bits, row_size).sum()
    if not total.is_cuda:
        return NonzeroCount(total, ends, None)
    copied, ready = total.to("cpu", non_blocking=True), torch.cuda.Event()
    ready.record()
    return NonzeroCount(copied, ends, ready)


def compact(x: Tensor, bits: Tensor, total: int, block_ends: Tensor, block_format: BlockFormat | None) -> SparseValues:
    """Pack the elements of x [rows, n] that the bits mark."""
    if packed.use_triton(x) and block_ends.numel():
        from echelon.kernels.activations import sparse_values_triton

        return sparse_values_triton.compact(x, bits, total, block_ends, block_format)
    codes, scales = (x, empty_scales(x)) if block_format is None else encode_plain(x, block_format)
    # FP8 dtypes do not support indexing; their bytes do.
    values = codes.view(torch.uint8) if codes.element_size() == 1 else codes
    return SparseValues(values[packed.unpack_plain(bits, x.shape[1])].view(codes.dtype), scales, block_ends)


def expand(sparse: SparseValues, bits: Tensor, block_format: BlockFormat | None, out: Tensor) -> None:
    """Expand into `out` [rows, n], with zeros where no bit is set; the inverse of `compact`."""
    if packed.use_triton(out) and sparse.block_ends.numel():
        from echelon.kernels.activations import sparse_values_triton

        sparse_values_triton.expand(sparse, bits, block_format, out)
        return
    where = packed.unpack_plain(bits, out.shape[1])
    values = sparse.values.view(torch.uint8) if sparse.values.element_size() == 1 else sparse.values
    codes = values.new_zeros(out.shape).masked_scatter_(where, values).view(sparse.values.dtype)
    out.copy_(codes if block_format is None else decode_plain(codes, sparse.scales, block_format))
