"""Low-precision formats for saved activations: fp16, or 8 bits with a scale per block of a row.

fp16    half precision; larger values saturate
fp8     e4m3: the absolute maximum of a block maps to the end of the dtype's range
int8    127 equal steps between 0 and the absolute maximum of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask
from echelon.kernels.memory_limits import SCALE_BLOCK

MIN_SCALE = 1e-30
"""lower bound of a scale, so that a block of zeros has a finite inverse"""


@dataclass(frozen=True)
class BlockFormat:
    """A low-precision format."""

    name: str
    dtype: torch.dtype
    max_value: float
    """what the absolute maximum of a block maps to; in fp16, the saturation value"""

    @property
    def has_scales(self) -> bool:
        return self.name != "fp16"


FORMATS = {
    "fp16": BlockFormat("fp16", torch.float16, 65504.0),
    "fp8": BlockFormat("fp8", torch.float8_e4m3fn, 448.0),
    "int8": BlockFormat("int8", torch.int8, 127.0),
}


def encode(x: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return (codes [rows, n], scales [rows, blocks]); fp16 has no scales."""
    if bitmask.use_triton(x):
        from echelon.kernels.activations import blockwise_cast_triton

        return blockwise_cast_triton.encode(x, block_format)
    return encode_plain(x, block_format)


def decode(codes: Tensor, scales: Tensor, block_format: BlockFormat, out: Tensor) -> None:
    """Decode into `out` [rows, n]; the inverse of `encode`."""
    if bitmask.use_triton(out):
        from echelon.kernels.activations import blockwise_cast_triton

        blockwise_cast_triton.decode(codes, scales, block_format, out)
    else:
        out.copy_(decode_plain(codes, scales, block_format))


def empty_scales(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def encode_plain(x: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    if not block_format.has_scales:
        return x.clamp(-block_format.max_value, block_format.max_value).to(block_format.dtype), empty_scales(x)
    rows, n = x.shape
    blocks = _split_blocks(x.float())
    scales = (blocks.abs().amax(-1) / block_format.max_value).clamp_min(MIN_SCALE)
    values = blocks * (1.0 / scales).unsqueeze(-1)
    if block_format.dtype == torch.int8:
        values = torch.round(values)
    codes = values.clamp(-block_format.max_value, block_format.max_value).to(block_format.dtype)
    return codes.view(rows, -1)[:, :n].contiguous(), scales


def decode_plain(codes: Tensor, scales: Tensor, block_format: BlockFormat) -> Tensor:
    """Return float32 [rows, n], or fp16 codes as they are."""
    if not block_format.has_scales:
        return codes
    rows, n = codes.shape
    return (_split_blocks(codes.float()) * scales.unsqueeze(-1)).view(rows, -1)[:, :n]


def _split_blocks(x: Tensor) -> Tensor:
    """View rows as [rows, blocks, SCALE_BLOCK], padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % SCALE_BLOCK)).view(len(x), -1, SCALE_BLOCK)
