"""optim/rules/ema.py's kernel: a program takes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.weight_formats_triton import BLOCK, WARPS, element_offsets, load_weights, view_as_int16


@triton.jit
def _average(average_ptr, high_ptr, low_ptr, live_ptr, size, rest, BLOCK: tl.constexpr):
    if tl.load(live_ptr) == 0:
        return
    at, inside = element_offsets(size, BLOCK)
    average = tl.load(average_ptr + at, mask=inside, other=0.0)
    w = load_weights(high_ptr, low_ptr, at, inside)
    tl.store(average_ptr + at, average + (w - average) * rest, mask=inside)


def update_ema(ema: Tensor, high: Tensor, low: Tensor | None, do_update: Tensor, weight: float) -> None:
    """The average goes a part of the way, `rest`, to the weights, where `live` is true."""
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
