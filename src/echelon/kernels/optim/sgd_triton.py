"""SGD kernel: a program processes a block of elements."""

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


def update(
    high: Tensor,
    low: Tensor | None,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    grad_scale: Tensor,
    do_update: Tensor,
    step: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    num_decayed: int,
    momentum: float,
    indices: ElementIndices,
) -> None:
    """Update as `lion_triton.update`."""
    _sgd[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, momentum_buffer, view_as_int16(gradient), grad_scale, do_update, step),
        rounding_indices(high, low=low, indices=indices),
        len(high), num_decayed, lr, weight_decay, momentum,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
