"""adamw.py's kernel: a program takes a block of elements."""

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
    write,
    write_weights,
)


@triton.jit
def moved(w, mean, square, gradient, shrink, numbers_ptr):
    """(weights, mean, square) after the step"""
    g = gradient * tl.load(numbers_ptr + 8)
    m = mean * tl.load(numbers_ptr + 0) + g * tl.load(numbers_ptr + 1)
    v = square * tl.load(numbers_ptr + 2) + g * g * tl.load(numbers_ptr + 3)
    below = tl.sqrt_rn(v) * tl.load(numbers_ptr + 6) + tl.load(numbers_ptr + 4)
    return w * shrink - tl.div_rn(m * tl.load(numbers_ptr + 5), below), m, v


@triton.jit(do_not_specialize=["decayed"])
def _adamw(
    high_ptr, low_ptr, mean_ptr, square_ptr, gradient_ptr, numbers_ptr, step_ptr, place_ptr, size, decayed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers_ptr + 9) == 0:
        return
    at, inside = places(size, BLOCK)
    w = read_weights(high_ptr, low_ptr, at, inside)
    mean, square = read(mean_ptr, at, inside), read(square_ptr, at, inside)
    shrink = tl.where(at < decayed, tl.load(numbers_ptr + 7), 1.0)
    w, m, v = moved(w, mean, square, read(gradient_ptr, at, inside), shrink, numbers_ptr)
    chance = drawn(at, step_ptr, place_ptr)
    write_weights(high_ptr, low_ptr, at, inside, w, chance)
    write(mean_ptr, at, inside, m, chance, 0)
    write(square_ptr, at, inside, v, chance, 16)


def update(
    high: Tensor,
    low: Tensor | None,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    step: Tensor,
    *,
    decayed: int,
    place: Place,
) -> None:
    """As in adamw.py, for arithmetic in float32."""
    where = place_for(high, mean, low=low, place=place)
    _adamw[(triton.cdiv(len(high), BLOCK),)](
        as_bits(high), low, as_bits(mean), as_bits(square), as_bits(gradient), numbers, step, where, len(high), decayed,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
