"""Fused AdamW kernel: a program processes a block of elements. `constants` are those of fused_adamw.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.stochastic_round import ElementIndices
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
def adamw_step(w, exp_avg, exp_avg_sq, gradient, decay_factor, constants_ptr):
    """Return (weights, exp_avg, exp_avg_sq) after the step."""
    g = gradient * tl.load(constants_ptr + 8)
    m = exp_avg * tl.load(constants_ptr + 0) + g * tl.load(constants_ptr + 1)
    v = exp_avg_sq * tl.load(constants_ptr + 2) + g * g * tl.load(constants_ptr + 3)
    denominator = tl.sqrt_rn(v) * tl.load(constants_ptr + 6) + tl.load(constants_ptr + 4)
    return w * decay_factor - tl.div_rn(m * tl.load(constants_ptr + 5), denominator), m, v


@triton.jit(do_not_specialize=["num_decayed"])
def _adamw(
    high_ptr, low_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, constants_ptr, step_ptr, indices_ptr,
    size, num_decayed, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(constants_ptr + 9) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, mask)
    exp_avg, exp_avg_sq = load_fp32(exp_avg_ptr, at, mask), load_fp32(exp_avg_sq_ptr, at, mask)
    decay_factor = tl.where(at < num_decayed, tl.load(constants_ptr + 7), 1.0)
    w, m, v = adamw_step(w, exp_avg, exp_avg_sq, load_fp32(gradient_ptr, at, mask), decay_factor, constants_ptr)
    bits = random_bits(at, step_ptr, indices_ptr)
    store_weights(high_ptr, low_ptr, at, mask, w, bits)
    store_rounded(exp_avg_ptr, at, mask, m, bits, 0)
    store_rounded(exp_avg_sq_ptr, at, mask, v, bits, 16)


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
    """Update as `fused_adamw.update`, with float32 arithmetic."""
    rounding = rounding_indices(high, exp_avg, low=low, indices=indices)
    _adamw[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, view_as_int16(exp_avg), view_as_int16(exp_avg_sq), view_as_int16(gradient)),
        constants, step, rounding, len(high), num_decayed,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
