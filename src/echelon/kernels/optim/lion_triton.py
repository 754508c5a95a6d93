"""optim/rules/lion.py's kernel: a program takes a block of elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.fused_adamw import Place
from echelon.kernels.optim.weight_formats_triton import (
    BLOCK,
    WARPS,
    as_bits,
    drawn,
    place_for,
    places,
    read,
    read_weights,
    write_weights,
)


@triton.jit(do_not_specialize=["decayed"])
def _lion(
    high_ptr, low_ptr, mean_ptr, gradient_ptr, scale_ptr, live_ptr, step_ptr, place_ptr, size, decayed,
    lr, decay, beta1, rest1, beta2, rest2, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside = places(size, BLOCK)
    w = read_weights(high_ptr, low_ptr, at, inside)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    g = read(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    c = mean * beta1 + g * rest1
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
    w = w - (sign + w * tl.where(at < decayed, decay, 0.0)) * lr
    write_weights(high_ptr, low_ptr, at, inside, w, drawn(at, step_ptr, place_ptr))
    tl.store(mean_ptr + at, mean * beta2 + g * rest2, mask=inside)


def update(
    high: Tensor,
    low: Tensor | None,
    mean: Tensor,
    gradient: Tensor,
    scale: Tensor,
    live: Tensor,
    step: Tensor | None,
    *,
    lr: float,
    decay: float,
    decayed: int,
    betas: tuple[float, float],
    place: Place,
) -> None:
    """Updates flat tensors of one length, of which the first `decayed` elements decay, where `live` is true.

    `high` is the weights, or with `low` their upper halves; in bfloat16 alone they are rounded by `step` and `place`.
    """
    beta1, beta2 = betas
    _lion[(triton.cdiv(len(high), BLOCK),)](
        as_bits(high), low, mean, as_bits(gradient), scale, live, step, place_for(high, low=low, place=place),
        len(high), decayed, lr, decay, beta1, 1 - beta1, beta2, 1 - beta2,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
