"""Only what is not zero: the values that bits mark, side by side, in their own type or in fewer bits.

The bits are those that ReLU kept anyway (bits.py). Scales are of blocks of elements as they lie, zeros included, so a
value is rounded the same way whether its neighbours are stored or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask as packed
from echelon.kernels.activations.blockwise_cast import Kind, decode_plain, encode_plain, no_scales


@dataclass(frozen=True)
class Values:
    values: Tensor
    """[how many bits are set]"""
    scales: Tensor
    """[rows, blocks]; none in 16 bits or in their own type"""
    ends: Tensor
    """where the values of each block end, for our kernels only"""


@dataclass(frozen=True)
class Count:
    """How many bits are set, on its way from the device: what is allocated depends on it."""

    total: Tensor
    """where the processor can read it, once it has come"""
    ends: Tensor
    come: torch.cuda.Event | None

    def wait(self) -> int:
        if self.come is not None:
            self.come.synchronize()
        return int(self.total)


def count(bits: Tensor, counts: Tensor, row: int) -> Count:
    """Counts, and waits for nothing."""
    if counts.numel():
        wide = bits.numel() * 8 >= 1 << 31
        ends = counts.cumsum(0, dtype=torch.int64 if wide else torch.int32)
        total = ends[-1]
    else:
        ends, total = counts, packed.unpack_plain(bits, row).sum()
    if not total.is_cuda:
        return Count(total, ends, None)
    here, come = total.to("cpu", non_blocking=True), torch.cuda.Event()
    come.record()
    return Count(here, ends, come)


def compact(x: Tensor, bits: Tensor, total: int, ends: Tensor, kind: Kind | None) -> Values:
    """Of x [rows, n], what the bits mark."""
    if packed.ours(x) and ends.numel():
        from echelon.kernels.activations import sparse_values_triton

        return sparse_values_triton.compact(x, bits, total, ends, kind)
    codes, scales = (x, no_scales(x)) if kind is None else encode_plain(x, kind)
    # Types of 8 bits know no operators; their bytes do.
    values = codes.view(torch.uint8) if codes.element_size() == 1 else codes
    return Values(values[packed.unpack_plain(bits, x.shape[1])].view(codes.dtype), scales, ends)


def expand(found: Values, bits: Tensor, kind: Kind | None, out: Tensor) -> None:
    """The inverse of `compact`, into [rows, n], with zeros where no bit is set."""
    if packed.ours(out) and found.ends.numel():
        from echelon.kernels.activations import sparse_values_triton

        sparse_values_triton.expand(found, bits, kind, out)
        return
    where = packed.unpack_plain(bits, out.shape[1])
    values = found.values.view(torch.uint8) if found.values.element_size() == 1 else found.values
    codes = values.new_zeros(out.shape).masked_scatter_(where, values).view(found.values.dtype)
    out.copy_(codes if kind is None else decode_plain(codes, found.scales, kind))
