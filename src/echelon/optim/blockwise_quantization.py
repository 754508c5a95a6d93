"""Blockwise 8-bit quantization (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

A block of 256 elements is divided by its absolute maximum, and each element is stored as the nearest of 256 values,
which are denser towards 0 (the paper's dynamic tree): a unary exponent of ten, and the remaining bits divide the range
from 0.1 to 1 evenly:

    signed     e = 0 .. 6:  10^-e x the centres of 2^(6-e) even intervals of [0.1, 1], with both signs; and 0, 1
    unsigned   e = 0 .. 6:  10^-e x the centres of 2^(7-e) even intervals of [0.1, 1]; and 0, 1

So a value is stored to half an interval of its own power of ten: 0.9 / 2^(7-e) / 2 of 10^-e in the unsigned codebook.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.optim.cost import QUANTIZATION_BLOCK


@lru_cache
def codebook(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values, in order."""
    values = [0.0, 1.0]
    for e in range(7):
        intervals = 2 ** (6 - e if signed else 7 - e)
        centres = [10.0**-e * (0.1 + 0.9 * (index + 0.5) / intervals) for index in range(intervals)]
        values += centres + ([-centre for centre in centres] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@lru_cache
def code_boundaries(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 midpoints between them."""
    values = codebook(signed, device)
    return (values[1:] + values[:-1]) / 2


@lru_cache
def _code_lookup(signed: bool) -> tuple[Tensor, Tensor]:
    """Return a lookup table for the CPU: for the upper 16 bits of a float32, the number of boundaries below all values
    with these bits; and the boundaries, with an end. At most one boundary is among values with the same upper bits, so
    one comparison finds a code."""
    boundaries = code_boundaries(signed, torch.device("cpu"))
    bits = torch.arange(1 << 16, dtype=torch.int64) << 16
    ends = torch.stack([bits, bits + 0xFFFF]).to(torch.int32).view(torch.float32)
    ends = torch.where(ends.isnan(), ends[0].nan_to_num(nan=torch.inf), ends)
    first, last = (torch.bucketize(end, boundaries) for end in (ends.amin(0), ends.amax(0)))
    assert int((last - first).max()) == 1
    return first, torch.cat([boundaries, torch.tensor([torch.inf])])


def nearest_codes(normalized: Tensor, signed: bool) -> Tensor:
    """Return the codes of the nearest of the 256 values, for values from -1 to 1."""
    if normalized.device.type != "cpu":
        return torch.bucketize(normalized, code_boundaries(signed, normalized.device)).to(torch.uint8)
    # The same as above, in a fifth of the time.
    first_codes, boundaries = _code_lookup(signed)
    first = first_codes.take(((normalized.view(torch.int32) >> 16) & 0xFFFF).long())
    return (first + (boundaries.take(first) < normalized)).to(torch.uint8)


class BlockQuantizedState:
    """A flat state in 8 bits: codes, and the absolute maximum of each block."""

    def __init__(self, size: int, *, signed: bool, device: torch.device):
        self.signed, self.device = signed, device
        zero = int(torch.searchsorted(codebook(signed, torch.device("cpu")), torch.tensor(0.0)))
        self.codes = torch.full((size,), zero, dtype=torch.uint8, device=device)
        self.block_amax = torch.zeros(-(-size // QUANTIZATION_BLOCK), dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(codes, amax of each block, the codebook's values, the boundaries between them)"""
        values, boundaries = codebook(self.signed, self.device), code_boundaries(self.signed, self.device)
        return self.codes, self.block_amax, values, boundaries

    def read(self, chunk: slice, dtype: torch.dtype) -> Tensor:
        """Dequantize a range of full blocks."""
        values = codebook(self.signed, self.device).take(self.codes[chunk].long()).to(dtype)
        return values * self._expand_blocks(self.block_amax[self._block_slice(chunk)].to(dtype), len(values))

    def write(self, chunk: slice, values: Tensor, do_update: Tensor) -> None:
        """Quantize values; change nothing where `do_update` is false."""
        blocks = self._block_slice(chunk)
        padded = F.pad(values.float(), (0, -len(values) % QUANTIZATION_BLOCK)).view(-1, QUANTIZATION_BLOCK)
        amax = padded.abs().amax(1)
        inverse = 1.0 / amax.clamp(min=torch.finfo(torch.float32).tiny)
        normalized = values.float() * self._expand_blocks(inverse, len(values))
        codes = nearest_codes(normalized, self.signed)
        self.codes[chunk] = torch.where(do_update, codes, self.codes[chunk])
        self.block_amax[blocks] = torch.where(do_update, amax, self.block_amax[blocks])

    # -- for checkpoints: codes, and the block maximum of every element -----------------------------------------------

    def read_codes(self) -> Tensor:
        return self.codes

    def read_amax(self) -> Tensor:
        return self._expand_blocks(self.block_amax, len(self.codes))

    def write_codes(self, codes: Tensor) -> None:
        self.codes.copy_(codes)

    def write_amax(self, amax: Tensor) -> None:
        """Set the maxima of the codes written before; requantize if they come from other blocks."""
        amax = amax.to(self.device)
        if not len(amax):
            return
        padding = (0, -len(amax) % QUANTIZATION_BLOCK)
        padded = F.pad(amax[None], padding, mode="replicate").view(-1, QUANTIZATION_BLOCK)
        self.block_amax.copy_(padded[:, 0])
        if not bool((padded == padded[:, :1]).all()):
            numbers = codebook(self.signed, self.device)[self.codes.long()] * amax
            self.write(slice(0, len(numbers)), numbers, torch.ones((), dtype=torch.bool, device=self.device))

    @staticmethod
    def _block_slice(chunk: slice) -> slice:
        assert chunk.start % QUANTIZATION_BLOCK == 0
        return slice(chunk.start // QUANTIZATION_BLOCK, -(-chunk.stop // QUANTIZATION_BLOCK))

    @staticmethod
    def _expand_blocks(amax: Tensor, count: int) -> Tensor:
        return amax.repeat_interleave(QUANTIZATION_BLOCK)[:count]
