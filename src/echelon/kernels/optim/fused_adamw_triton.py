"""adamw.py's kernel: a program takes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.fused_adamw import ElementIndices
from echelon.kernels.optim.weight_formats_triton import (
    BLOCK,
    WARPS,
    element_offsets,
    load_fp32,
    load_weights,
    random_bits,
    rounding_indices,
    store_rounded,
    store_weights,
    view_as_int16,
)


@triton.jit
def adamw_step(w, mean, square, gradient, shrink, numbers_ptr):
    """(weights, mean, square) after the step"""
    g = gradient * tl.load(numbers_ptr + 8)
    m = mean * tl.load(numbers_ptr + 0) + g * tl.load(numbers_ptr + 1)
    v = square * tl.load(numbers_ptr + 2) + g * g * tl.load(numbers_ptr + 3)
    below = tl.sqrt_rn(v) * tl.load(numbers_ptr + 6) + tl.load(numbers_ptr + 4)
    return w * shrink - tl.div_rn(m * tl.load(numbers_ptr + 5), below), m, v


@triton.jit(do_not_specialize=["decayed"])
def _adamw(
    high_ptr, low_ptr, mean_ptr, square_ptr, gradient_ptr, numbers_ptr, step_ptr, place_ptr, size, decayed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers_ptr + 9) == 0:
        return
    at, inside = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, inside)
    mean, square = load_fp32(mean_ptr, at, inside), load_fp32(square_ptr, at, inside)
    shrink = tl.where(at < decayed, tl.load(numbers_ptr + 7), 1.0)
    w, m, v = adamw_step(w, mean, square, load_fp32(gradient_ptr, at, inside), shrink, numbers_ptr)
    chance = random_bits(at, step_ptr, place_ptr)
    store_weights(high_ptr, low_ptr, at, inside, w, chance)
    store_rounded(mean_ptr, at, inside, m, chance, 0)
    store_rounded(square_ptr, at, inside, v, chance, 16)


def update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    *,
    num_decayed: int,
    indices: ElementIndices,
) -> None:
    """As in adamw.py, for arithmetic in float32."""
    where = rounding_indices(high, exp_avg, low=low, indices=indices)
    _adamw[(triton.cdiv(len(high), BLOCK),)](
        view_as_int16(high), low, view_as_int16(exp_avg), view_as_int16(exp_avg_sq), view_as_int16(gradient), constants, step, where, len(high), num_decayed,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
