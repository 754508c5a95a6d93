"""optim/rules/lamb.py's kernels: one takes the gradient into the moments and adds up both norms, one moves the weights."""

from __future__ import annotations

import torch
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
    store_weights,
    view_as_int16,
)


@triton.jit
def _update_direction(w, m, v, numbers_ptr, decay):
    """Where the weights move, before it is multiplied by anything."""
    correction1, correction2, eps = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    return tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps) + w * decay


@triton.jit
def _lamb_moments(
    high_ptr, low_ptr, mean_ptr, square_ptr, gradient_ptr, scale_ptr, live_ptr, numbers_ptr, sums_ptr, size, decay,
    beta1, rest1, beta2, rest2, BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside = element_offsets(size, BLOCK)
    m = tl.load(mean_ptr + at, mask=inside, other=0.0)
    v = tl.load(square_ptr + at, mask=inside, other=0.0)
    if tl.load(live_ptr) != 0:
        g = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        tl.store(mean_ptr + at, m, mask=inside)
        tl.store(square_ptr + at, v, mask=inside)
    w = load_weights(high_ptr, low_ptr, at, inside)
    towards = tl.where(inside, _update_direction(w, m, v, numbers_ptr, decay), 0.0)
    tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(w * w))
    tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(towards * towards))


@triton.jit
def _lamb_apply(
    high_ptr, low_ptr, mean_ptr, square_ptr, live_ptr, numbers_ptr, rate_ptr, step_ptr, place_ptr, size, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside = element_offsets(size, BLOCK)
    m = tl.load(mean_ptr + at, mask=inside, other=0.0)
    v = tl.load(square_ptr + at, mask=inside, other=0.0)
    w = load_weights(high_ptr, low_ptr, at, inside)
    w = w - _update_direction(w, m, v, numbers_ptr, decay) * tl.load(rate_ptr)
    store_weights(high_ptr, low_ptr, at, inside, w, random_bits(at, step_ptr, place_ptr))


def update_moments(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    grad_scale: Tensor,
    do_update: Tensor,
    constants: Tensor,
    *,
    weight_decay: float,
    betas: tuple[float, float],
) -> Tensor:
    """Moments of flat tensors of one length, where `live` is true. `numbers` are both corrections and eps.

    Gives the sums of squares of the weights, and of where they move.
    """
    beta1, beta2 = betas
    programs = triton.cdiv(len(high), BLOCK)
    sums = torch.empty(programs, 2, dtype=torch.float32, device=high.device)
    _lamb_moments[(programs,)](
        view_as_int16(high), low, exp_avg, exp_avg_sq, view_as_int16(gradient), grad_scale, do_update, constants, sums, len(high), weight_decay,
        beta1, 1 - beta1, beta2, 1 - beta2, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return sums.sum(0)


def apply_update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    do_update: Tensor,
    constants: Tensor,
    rate: Tensor,
    step: Tensor | None,
    *,
    weight_decay: float,
    indices: ElementIndices | None,
) -> None:
    """Moves weights by `rate`, where `live` is true; in bfloat16 alone they are rounded by `step` and `place`."""
    _lamb_apply[(triton.cdiv(len(high), BLOCK),)](
        view_as_int16(high), low, exp_avg, exp_avg_sq, do_update, constants, rate, step, rounding_indices(high, low=low, indices=indices),
        len(high), weight_decay, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
