"""optim/rules/sgd.py's kernel: a program takes a block of elements."""

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
def _sgd(
    high_ptr, low_ptr, moment_ptr, gradient_ptr, scale_ptr, live_ptr, step_ptr, place_ptr, size, decayed,
    lr, decay, momentum, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, inside)
    towards = load_fp32(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    towards = towards + w * tl.where(at < decayed, decay, 0.0)
    if moment_ptr is not None:
        towards = towards + tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum
        tl.store(moment_ptr + at, towards, mask=inside)
    store_weights(high_ptr, low_ptr, at, inside, w - towards * lr, random_bits(at, step_ptr, place_ptr))


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
    """As lion_gpu.py's."""
    _sgd[(triton.cdiv(len(high), BLOCK),)](
        view_as_int16(high), low, momentum_buffer, view_as_int16(gradient), grad_scale, do_update, step, rounding_indices(high, low=low, indices=indices),
        len(high), num_decayed, lr, weight_decay, momentum,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
