"""Values in fewer bits, for a while: 16, or 8 with a scale for each block of a row.

fp16    half precision; what is larger than the type holds becomes the largest that it holds
fp8     e4m3: the largest of a block is brought to the end of the type's range
int8    127 steps of equal size between 0 and the largest of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask
from echelon.kernels.tensor_spec import BLOCK

MIN_SCALE = 1e-30
"""scales below this count as this, so that zeros stay zeros"""


@dataclass(frozen=True)
class BlockFormat:
    name: str
    dtype: torch.dtype
    max_value: float
    """what the largest of a block is brought to; of fp16, what values are cut to"""

    @property
    def has_scales(self) -> bool:
        return self.name != "fp16"


FORMATS = {
    "fp16": BlockFormat("fp16", torch.float16, 65504.0),
    "fp8": BlockFormat("fp8", torch.float8_e4m3fn, 448.0),
    "int8": BlockFormat("int8", torch.int8, 127.0),
}


def encode(x: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """(values [rows, n] in the kind's type, scales [rows, blocks]; none of fp16)"""
    if bitmask.use_triton(x):
        from echelon.kernels.activations import blockwise_cast_triton

        return blockwise_cast_triton.encode(x, block_format)
    return encode_plain(x, block_format)


def decode(codes: Tensor, scales: Tensor, block_format: BlockFormat, out: Tensor) -> None:
    """The inverse of `encode`, into [rows, n]."""
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
    """float32 [rows, n]; of fp16 half precision"""
    if not block_format.has_scales:
        return codes
    rows, n = codes.shape
    return (_split_blocks(codes.float()) * scales.unsqueeze(-1)).view(rows, -1)[:, :n]


def _split_blocks(x: Tensor) -> Tensor:
    """[rows, blocks, BLOCK], with zeros behind the end of each row"""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
