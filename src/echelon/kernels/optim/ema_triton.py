"""Kernel of the exponential moving average of weights: a program processes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.weight_formats_triton import BLOCK, WARPS, element_offsets, load_weights, view_as_int16


@triton.jit
def _average(average_ptr, high_ptr, low_ptr, do_update_ptr, size, rest, BLOCK: tl.constexpr):
    if tl.load(do_update_ptr) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    average = tl.load(average_ptr + at, mask=mask, other=0.0)
    w = load_weights(high_ptr, low_ptr, at, mask)
    tl.store(average_ptr + at, average + (w - average) * rest, mask=mask)


def update_ema(ema: Tensor, high: Tensor, low: Tensor | None, do_update: Tensor, weight: float) -> None:
    """Move the average towards the weights by `weight` of the difference, where `do_update` is true."""
    _average[(triton.cdiv(len(high), BLOCK),)](
        ema,
        view_as_int16(high),
        low,
        do_update,
        len(high),
        weight,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
