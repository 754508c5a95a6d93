"""Kernels of Lion, SGD, LAMB and the exponential moving average of weights: a program processes a block of elements.

`high` is the weights, or with `low` their upper halves; bfloat16 alone is rounded stochastically. All tensors are flat
and of one length; the first `num_decayed` elements have weight decay. Nothing is written where `do_update` is false.
"""

from __future__ import annotations

from typing import Any

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


@triton.jit(do_not_specialize=["num_decayed"])
def _lion(
    high_ptr, low_ptr, exp_avg_ptr, gradient_ptr, scale_ptr, do_update_ptr, step_ptr, indices_ptr, size, num_decayed,
    lr, decay, beta1, rest1, beta2, rest2, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(do_update_ptr) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, mask)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    g = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32)
    c = exp_avg * beta1 + g * rest1
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
    w = w - (sign + w * tl.where(at < num_decayed, decay, 0.0)) * lr
    store_weights(high_ptr, low_ptr, at, mask, w, random_bits(at, step_ptr, indices_ptr))
    tl.store(exp_avg_ptr + at, exp_avg * beta2 + g * rest2, mask=mask)


@triton.jit(do_not_specialize=["num_decayed"])
def _sgd(
    high_ptr, low_ptr, momentum_ptr, gradient_ptr, scale_ptr, do_update_ptr, step_ptr, indices_ptr, size, num_decayed,
    lr, decay, momentum, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(do_update_ptr) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, mask)
    direction = load_fp32(gradient_ptr, at, mask) * tl.load(scale_ptr).to(tl.float32)
    direction = direction + w * tl.where(at < num_decayed, decay, 0.0)
    if momentum_ptr is not None:
        direction = direction + tl.load(momentum_ptr + at, mask=mask, other=0.0) * momentum
        tl.store(momentum_ptr + at, direction, mask=mask)
    store_weights(high_ptr, low_ptr, at, mask, w - direction * lr, random_bits(at, step_ptr, indices_ptr))


@triton.jit
def _average(average_ptr, high_ptr, low_ptr, do_update_ptr, size, rest, BLOCK: tl.constexpr):
    if tl.load(do_update_ptr) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    average = tl.load(average_ptr + at, mask=mask, other=0.0)
    w = load_weights(high_ptr, low_ptr, at, mask)
    tl.store(average_ptr + at, average + (w - average) * rest, mask=mask)


@triton.jit
def _lamb_direction(w, m, v, constants_ptr, decay):
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
    direction = tl.where(mask, _lamb_direction(w, m, v, constants_ptr, decay), 0.0)
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
    w = w - _lamb_direction(w, m, v, constants_ptr, decay) * tl.load(rate_ptr)
    store_weights(high_ptr, low_ptr, at, mask, w, random_bits(at, step_ptr, indices_ptr))


StepTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]
"""(high, low, state, gradient, grad_scale, do_update, step)"""


def lion_update(
    tensors: StepTensors,
    *,
    lr: float,
    weight_decay: float,
    num_decayed: int,
    betas: tuple[float, float],
    indices: ElementIndices,
) -> None:
    beta1, beta2 = betas
    _launch(_lion, tensors, indices, num_decayed, lr, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2)


def sgd_update(
    tensors: StepTensors,
    *,
    lr: float,
    weight_decay: float,
    num_decayed: int,
    momentum: float,
    indices: ElementIndices,
) -> None:
    _launch(_sgd, tensors, indices, num_decayed, lr, weight_decay, momentum)


def _launch(kernel: Any, tensors: StepTensors, indices: ElementIndices, *numbers: float) -> None:
    high, low, state, gradient, grad_scale, do_update, step = tensors
    kernel[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, state, view_as_int16(gradient), grad_scale, do_update, step),
        rounding_indices(high, low=low, indices=indices), len(high), *numbers,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def update_ema(ema: Tensor, high: Tensor, low: Tensor | None, do_update: Tensor, weight: float) -> None:
    """Move the average towards the weights by `weight` of the difference, where `do_update` is true."""
    _average[(triton.cdiv(len(high), BLOCK),)](
        ema, view_as_int16(high), low, do_update, len(high), weight,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def lamb_update_moments(
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
    """Update the moments; return the sums of squares of weights and update direction.

    `constants` are both bias corrections and eps.
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


def lamb_apply_update(
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
    """Update weights by `rate`."""
    _lamb_apply[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, exp_avg, exp_avg_sq, do_update, constants, rate, step),
        rounding_indices(high, low=low, indices=indices),
        len(high), weight_decay, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
