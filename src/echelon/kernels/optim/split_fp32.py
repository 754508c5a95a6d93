"""Master weights in two halves: float32 as the nearest bfloat16, and the rest of its bits.

    bits of the float32 = (bits of the bfloat16 << 16) + low,    low from -32768 to 32767

The upper half is (bits + 0x8000) >> 16: rounded to nearest, with ties away from zero where a cast rounds to even. Every
value is restored bit for bit, infinities and both zeros too. The upper half differs from the value in two cases: from
3.396e38 on it is infinite, as after a cast, while both halves restore the value; and every NaN becomes the quiet one,
since the bits of another NaN may round to a zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels import dispatch

QUIET_NAN = 0x7FC00000


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values of bfloat16 and int16 halves."""
    if dispatch.use_triton_update(high.device):
        from echelon.kernels.optim import weight_formats_triton

        return weight_formats_triton.join_halves(high, low)
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def split_halves(values: Tensor, high: Tensor, low: Tensor) -> None:
    """Write both halves of float32 values; the inverse of `join_halves`."""
    if dispatch.use_triton_update(high.device):
        from echelon.kernels.optim import weight_formats_triton

        weight_formats_triton.split_halves(values, high, low)
        return
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(upper)
    low.copy_(bits - (upper << 16))
