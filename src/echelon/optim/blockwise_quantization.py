"""Numbers in 8 bits, by blocks (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

A block of 256 elements is divided by the largest of them, and each is kept as the nearest of 256 values, which lie
closer together towards 0 (the paper's dynamic tree): an exponent of ten in unary, and what is left of the bits divides
the range from 0.1 to 1 evenly:

    signed     e = 0 .. 6:  10^-e x the middles of 2^(6-e) even parts of [0.1, 1], with both signs; and 0, 1
    unsigned   e = 0 .. 6:  10^-e x the middles of 2^(7-e) even parts of [0.1, 1]; and 0, 1

So a number is kept to half a part of its own power of ten: 0.9 / 2^(7-e) / 2 of 10^-e in the unsigned kind.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.optim.cost import QUANTIZATION_BLOCK


@lru_cache
def codebook(signed: bool, device: torch.device) -> Tensor:
    """The 256 values, in order."""
    found = [0.0, 1.0]
    for e in range(7):
        parts = 2 ** (6 - e if signed else 7 - e)
        middles = [10.0**-e * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@lru_cache
def code_boundaries(signed: bool, device: torch.device) -> Tensor:
    """The 255 middles between them."""
    values = codebook(signed, device)
    return (values[1:] + values[:-1]) / 2


@lru_cache
def _code_lookup(signed: bool) -> tuple[Tensor, Tensor]:
    """For the processor: by the first 16 bits of a float32, how many borders lie below all numbers that begin so; and
    the borders, with an end. No two borders lie among numbers that begin alike, so one comparison finds a code."""
    borders = code_boundaries(signed, torch.device("cpu"))
    bits = torch.arange(1 << 16, dtype=torch.int64) << 16
    ends = torch.stack([bits, bits + 0xFFFF]).to(torch.int32).view(torch.float32)
    ends = torch.where(ends.isnan(), ends[0].nan_to_num(nan=torch.inf), ends)
    first, last = (torch.bucketize(end, borders) for end in (ends.amin(0), ends.amax(0)))
    assert int((last - first).max()) == 1
    return first, torch.cat([borders, torch.tensor([torch.inf])])


def nearest_codes(normalized: Tensor, signed: bool) -> Tensor:
    """The nearest of the 256 values, of numbers from -1 to 1."""
    if normalized.device.type != "cpu":
        return torch.bucketize(normalized, code_boundaries(signed, normalized.device)).to(torch.uint8)
    # As above, in a fifth of the time.
    starts, borders = _code_lookup(signed)
    first = starts.take(((normalized.view(torch.int32) >> 16) & 0xFFFF).long())
    return (first + (borders.take(first) < normalized)).to(torch.uint8)


class BlockQuantizedState:
    """A flat state, kept in 8 bits: codes, and the largest of each block."""

    def __init__(self, size: int, *, signed: bool, device: torch.device):
        self.signed, self.device = signed, device
        zero = int(torch.searchsorted(codebook(signed, torch.device("cpu")), torch.tensor(0.0)))
        self.codes = torch.full((size,), zero, dtype=torch.uint8, device=device)
        self.block_amax = torch.zeros(-(-size // QUANTIZATION_BLOCK), dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, the largest of each block, and what codes stand for: values, and borders between them."""
        return (
            self.codes,
            self.block_amax,
            codebook(self.signed, self.device),
            code_boundaries(self.signed, self.device),
        )

    def read(self, part: slice, dtype: torch.dtype) -> Tensor:
        """The numbers of some whole blocks."""
        values = codebook(self.signed, self.device).take(self.codes[part].long()).to(dtype)
        return values * self._expand_blocks(self.block_amax[self._block_slice(part)].to(dtype), len(values))

    def write(self, part: slice, values: Tensor, do_update: Tensor) -> None:
        """The nearest that can be kept; nothing where `live` is false."""
        blocks = self._block_slice(part)
        padded = F.pad(values.float(), (0, -len(values) % QUANTIZATION_BLOCK)).view(-1, QUANTIZATION_BLOCK)
        largest = padded.abs().amax(1)
        inverse = 1.0 / largest.clamp(min=torch.finfo(torch.float32).tiny)
        shares = values.float() * self._expand_blocks(inverse, len(values))
        codes = nearest_codes(shares, self.signed)
        self.codes[part] = torch.where(do_update, codes, self.codes[part])
        self.block_amax[blocks] = torch.where(do_update, largest, self.block_amax[blocks])

    # -- for checkpoints: codes, and for each element the largest of its block ----------------------------------------

    def read_codes(self) -> Tensor:
        return self.codes

    def read_amax(self) -> Tensor:
        return self._expand_blocks(self.block_amax, len(self.codes))

    def write_codes(self, codes: Tensor) -> None:
        self.codes.copy_(codes)

    def write_amax(self, largest: Tensor) -> None:
        """Of codes that were put here: as they are where these are their blocks, else kept anew."""
        largest = largest.to(self.device)
        if not len(largest):
            return
        padded = F.pad(largest[None], (0, -len(largest) % QUANTIZATION_BLOCK), mode="replicate")[0].view(
            -1, QUANTIZATION_BLOCK
        )
        self.block_amax.copy_(padded[:, 0])
        if not bool((padded == padded[:, :1]).all()):
            numbers = codebook(self.signed, self.device)[self.codes.long()] * largest
            self.write(slice(0, len(numbers)), numbers, torch.ones((), dtype=torch.bool, device=self.device))

    @staticmethod
    def _block_slice(part: slice) -> slice:
        assert part.start % QUANTIZATION_BLOCK == 0
        return slice(part.start // QUANTIZATION_BLOCK, -(-part.stop // QUANTIZATION_BLOCK))

    @staticmethod
    def _expand_blocks(largest: Tensor, count: int) -> Tensor:
        return largest.repeat_interleave(QUANTIZATION_BLOCK)[:count]
