"""LAMB kernels: one updates the moments and computes partial norms, one updates the weights."""

from __future__ import annotations

import torch
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
    store_weights,
    view_as_int16,
)


@triton.jit
def _update_direction(w, m, v, constants_ptr, decay):
    """Return the update direction, before the trust ratio and learning rate."""
    correction1, correction2, eps = tl.load(constants_ptr), tl.load(constants_ptr + 1), tl.load(constants_ptr + 2)
    return tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps) + w * decay


@triton.jit
def _lamb_moments(
    high_ptr, low_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, scale_ptr, do_update_ptr, constants_ptr,
    sums_ptr, size, decay,
    beta1, rest1, beta2, rest2, BLOCK: tl.constexpr,
):  # fmt: skip
    at, mask = element_offsets(size, BLOCK)
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
    if tl.load(do_update_ptr) != 0:
        g = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32)
        m = m * beta1 + g * rest1
        v = v * beta2 + g * g * rest2
        tl.store(exp_avg_ptr + at, m, mask=mask)
        tl.store(exp_avg_sq_ptr + at, v, mask=mask)
    w = load_weights(high_ptr, low_ptr, at, mask)
    direction = tl.where(mask, _update_direction(w, m, v, constants_ptr, decay), 0.0)
    tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(w * w))
    tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(direction * direction))


@triton.jit
def _lamb_apply(
    high_ptr, low_ptr, exp_avg_ptr, exp_avg_sq_ptr, do_update_ptr, constants_ptr, rate_ptr, step_ptr,
    indices_ptr, size, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(do_update_ptr) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
    w = load_weights(high_ptr, low_ptr, at, mask)
    w = w - _update_direction(w, m, v, constants_ptr, decay) * tl.load(rate_ptr)
    store_weights(high_ptr, low_ptr, at, mask, w, random_bits(at, step_ptr, indices_ptr))


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
    """Update the moments of flat tensors of one length, where `do_update` is true.

    `constants` are both bias corrections and eps. Returns the sums of squares of weights and update direction.
    """
    beta1, beta2 = betas
    programs = triton.cdiv(len(high), BLOCK)
    sums = torch.empty(programs, 2, dtype=torch.float32, device=high.device)
    _lamb_moments[(programs,)](
        *(view_as_int16(high), low, exp_avg, exp_avg_sq, view_as_int16(gradient), grad_scale, do_update),
        constants, sums, len(high), weight_decay,
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
    """Update weights by `rate`, where `do_update` is true; bfloat16 alone is rounded stochastically."""
    _lamb_apply[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, exp_avg, exp_avg_sq, do_update, constants, rate, step),
        rounding_indices(high, low=low, indices=indices),
        len(high), weight_decay, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
