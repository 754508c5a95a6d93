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

SMALLEST = 1e-30
"""scales below this count as this, so that zeros stay zeros"""


@dataclass(frozen=True)
class Kind:
    name: str
    dtype: torch.dtype
    most: float
    """what the largest of a block is brought to; of fp16, what values are cut to"""

    @property
    def scaled(self) -> bool:
        return self.name != "fp16"


KINDS = {
    "fp16": Kind("fp16", torch.float16, 65504.0),
    "fp8": Kind("fp8", torch.float8_e4m3fn, 448.0),
    "int8": Kind("int8", torch.int8, 127.0),
}


def encode(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(values [rows, n] in the kind's type, scales [rows, blocks]; none of fp16)"""
    if bitmask.ours(x):
        from echelon.kernels.activations import blockwise_cast_triton

        return blockwise_cast_triton.encode(x, kind)
    return encode_plain(x, kind)


def decode(codes: Tensor, scales: Tensor, kind: Kind, out: Tensor) -> None:
    """The inverse of `encode`, into [rows, n]."""
    if bitmask.ours(out):
        from echelon.kernels.activations import blockwise_cast_triton

        blockwise_cast_triton.decode(codes, scales, kind, out)
    else:
        out.copy_(decode_plain(codes, scales, kind))


def no_scales(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def encode_plain(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    if not kind.scaled:
        return x.clamp(-kind.most, kind.most).to(kind.dtype), no_scales(x)
    rows, n = x.shape
    blocks = _blocks(x.float())
    scales = (blocks.abs().amax(-1) / kind.most).clamp_min(SMALLEST)
    values = blocks * (1.0 / scales).unsqueeze(-1)
    if kind.dtype == torch.int8:
        values = torch.round(values)
    codes = values.clamp(-kind.most, kind.most).to(kind.dtype)
    return codes.view(rows, -1)[:, :n].contiguous(), scales


def decode_plain(codes: Tensor, scales: Tensor, kind: Kind) -> Tensor:
    """float32 [rows, n]; of fp16 half precision"""
    if not kind.scaled:
        return codes
    rows, n = codes.shape
    return (_blocks(codes.float()) * scales.unsqueeze(-1)).view(rows, -1)[:, :n]


def _blocks(x: Tensor) -> Tensor:
    """[rows, blocks, BLOCK], with zeros behind the end of each row"""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
