"""A float32 in two halves: the nearest bfloat16, and what is left of its bits.

    bits of the float32 = (bits of the bfloat16 << 16) + low,    low from -32768 to 32767

The upper half is (bits + 0x8000) >> 16: rounded to the nearest, and a tie away from zero, where a cast takes the even
neighbour. Every value comes back bit for bit, infinities and both zeros too. What the upper half shows differs from the
value in two cases: from 3.396e38 on it is infinite, as it is after a cast, while the value stays what it was; and every
NaN becomes the quiet one, because the bits of another may round to a zero, and nobody would see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.kernels import dispatch

QUIET_NAN = 0x7FC00000


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """The float32 values of bfloat16 and int16 halves."""
    if dispatch.use_triton_update(high.device):
        from echelon.kernels.optim import split_fp32_triton

        return split_fp32_triton.join_halves(high, low)
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def split_halves(values: Tensor, high: Tensor, low: Tensor) -> None:
    """The inverse: writes both halves of float32 values."""
    if dispatch.use_triton_update(high.device):
        from echelon.kernels.optim import split_fp32_triton

        split_fp32_triton.split_halves(values, high, low)
        return
    bits = torch.where(values.isnan(), QUIET_NAN, values.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(upper)
    low.copy_(bits - (upper << 16))
