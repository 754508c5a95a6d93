"""optim/rules/sgd.py's kernel: a program takes a block of elements."""

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
def _sgd(
    high_ptr, low_ptr, moment_ptr, gradient_ptr, scale_ptr, live_ptr, step_ptr, place_ptr, size, decayed,
    lr, decay, momentum, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(live_ptr) == 0:
        return
    at, inside = places(size, BLOCK)
    w = read_weights(high_ptr, low_ptr, at, inside)
    towards = read(gradient_ptr, at, inside) * tl.load(scale_ptr).to(tl.float32)
    towards = towards + w * tl.where(at < decayed, decay, 0.0)
    if moment_ptr is not None:
        towards = towards + tl.load(moment_ptr + at, mask=inside, other=0.0) * momentum
        tl.store(moment_ptr + at, towards, mask=inside)
    write_weights(high_ptr, low_ptr, at, inside, w - towards * lr, drawn(at, step_ptr, place_ptr))


def update(
    high: Tensor,
    low: Tensor | None,
    moment: Tensor | None,
    gradient: Tensor,
    scale: Tensor,
    live: Tensor,
    step: Tensor | None,
    *,
    lr: float,
    decay: float,
    decayed: int,
    momentum: float,
    place: Place,
) -> None:
    """As lion_gpu.py's."""
    _sgd[(triton.cdiv(len(high), BLOCK),)](
        as_bits(high), low, moment, as_bits(gradient), scale, live, step, place_for(high, low=low, place=place),
        len(high), decayed, lr, decay, momentum,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
