"""optim/rules/ema.py's kernel: a program takes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.weight_formats_triton import BLOCK, WARPS, as_bits, places, read_weights


@triton.jit
def _average(average_ptr, high_ptr, low_ptr, live_ptr, size, rest, BLOCK: tl.constexpr):
    if tl.load(live_ptr) == 0:
        return
    at, inside = places(size, BLOCK)
    average = tl.load(average_ptr + at, mask=inside, other=0.0)
    w = read_weights(high_ptr, low_ptr, at, inside)
    tl.store(average_ptr + at, average + (w - average) * rest, mask=inside)


def towards(average: Tensor, high: Tensor, low: Tensor | None, live: Tensor, rest: float) -> None:
    """The average goes a part of the way, `rest`, to the weights, where `live` is true."""
    _average[(triton.cdiv(len(high), BLOCK),)](
        average, as_bits(high), low, live, len(high), rest, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )
