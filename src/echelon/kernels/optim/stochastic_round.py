"""Stochastic rounding of float32 to bfloat16, by counter-based random bits.

A value is rounded up as often as it is nearer to its upper neighbour, so the mean is exact. The random bits are a hash
of the parameter's key, the element's index in the full parameter and the step number: every layout, and every run,
rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echelon.kernels.optim.split_fp32 import QUIET_NAN

MASK32 = 0xFFFFFFFF
SECOND_HASH = 0x9E3779B9


@dataclass(frozen=True)
class ElementIndices:
    """Indices of elements in their full parameter, which seed the random bits.

    The elements are consecutive, or a row-major range from `start` on of a box of the parameter: a tensor of at most
    three dims, given by its last two sizes, by the strides of its first two dims in the full parameter, and by `base`,
    the index of its first element.
    """

    start: int = 0
    key: int = 0
    """32 bits, of the parameter"""
    sizes: tuple[int, int] = (0, 0)
    """(second to last, last); zeros: consecutive indices"""
    strides: tuple[int, int] = (0, 0)
    base: int = 0

    def advance(self, count: int) -> ElementIndices:
        """Return the indices from the element `count` on."""
        return replace(self, start=self.start + count)

    def compute(self, count: int, device: torch.device) -> Tensor:
        """Return the indices of the first `count` elements, int64 [count]."""
        index = torch.arange(self.start, self.start + count, device=device)
        middle, inner = self.sizes
        if not inner:
            return index + self.base
        rows, column = index // inner, index % inner
        return self.base + (rows // middle) * self.strides[0] + (rows % middle) * self.strides[1] + column


def random_bits(count: int, indices: ElementIndices, step: Tensor) -> Tensor:
    """Return 32 random bits per element, int64 [count], a function of element and step."""
    return hash32((indices.compute(count, step.device) & MASK32) ^ hash32((step ^ indices.key) & MASK32))


def second_hash_bits(bits: Tensor) -> Tensor:
    """Derive another 16 random bits from 32: the first hash's bits round the moments."""
    return hash32(bits ^ SECOND_HASH) & 0xFFFF


def hash32(x: Tensor) -> Tensor:
    """Mix the 32 bits of an int64. (The constants are Ellis's, found by search for the least bias.)"""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Round floats to bfloat16: away from zero where the truncated part exceeds 16 random bits."""
    x = x.float()
    float_bits = torch.where(x.isnan(), QUIET_NAN, x.view(torch.int32))
    return ((float_bits + bits.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)
