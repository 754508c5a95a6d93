"""Lion kernel: a program processes a block of elements."""

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


def update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    gradient: Tensor,
    grad_scale: Tensor,
    do_update: Tensor,
    step: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    num_decayed: int,
    betas: tuple[float, float],
    indices: ElementIndices,
) -> None:
    """Update flat tensors of one length, of which the first `num_decayed` have weight decay, where `do_update` is true.

    `high` is the weights, or with `low` their upper halves; bfloat16 alone is rounded stochastically.
    """
    beta1, beta2 = betas
    _lion[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, exp_avg, view_as_int16(gradient), grad_scale, do_update, step),
        rounding_indices(high, low=low, indices=indices),
        len(high), num_decayed, lr, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
