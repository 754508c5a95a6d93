"""optim/rules/lion.py's kernel: a program takes a block of elements."""

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
    store_weights,
    view_as_int16,
)


@triton.jit(do_not_specialize=["decayed"])
def _lion(
    high_ptr, low_ptr, mean_ptr, gradient_ptr, scale_ptr, live_ptr, step_ptr, place_ptr, size, decayed,
    lr, decay, beta1, rest1, beta2, rest2, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, inside)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    g = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    c = mean * beta1 + g * rest1
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
    w = w - (sign + w * tl.where(at < decayed, decay, 0.0)) * lr
    store_weights(high_ptr, low_ptr, at, inside, w, random_bits(at, step_ptr, place_ptr))
    tl.store(mean_ptr + at, mean * beta2 + g * rest2, mask=inside)


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
    """Updates flat tensors of one length, of which the first `decayed` elements decay, where `live` is true.

    `high` is the weights, or with `low` their upper halves; in bfloat16 alone they are rounded by `step` and `place`.
    """
    beta1, beta2 = betas
    _lion[(triton.cdiv(len(high), BLOCK),)](
        view_as_int16(high), low, exp_avg, view_as_int16(gradient), grad_scale, do_update, step, rounding_indices(high, low=low, indices=indices),
        len(high), num_decayed, lr, weight_decay, beta1, 1 - beta1, beta2, 1 - beta2,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
