"""halves.py's kernels, and adamw.py's rounding by chance, for updates that are not one kernel themselves."""

from __future__ import annotations

import torch
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
    read_weights,
    write_weights,
)


@triton.jit
def _halves_join(high_ptr, low_ptr, values_ptr, size, BLOCK: tl.constexpr):
    at, inside = places(size, BLOCK)
    tl.store(values_ptr + at, read_weights(high_ptr, low_ptr, at, inside), mask=inside)


@triton.jit
def _halves_write(values_ptr, high_ptr, low_ptr, step_ptr, place_ptr, size, BLOCK: tl.constexpr):
    at, inside = places(size, BLOCK)
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    write_weights(high_ptr, low_ptr, at, inside, values, drawn(at, step_ptr, place_ptr))


def joined(high: Tensor, low: Tensor) -> Tensor:
    high, low = high.contiguous(), low.contiguous()
    values = torch.empty_like(high, dtype=torch.float32)
    _halves_join[(triton.cdiv(high.numel(), BLOCK),)](
        as_bits(high), low, values, high.numel(), BLOCK=BLOCK, num_warps=WARPS
    )
    return values


def split_into(values: Tensor, high: Tensor, low: Tensor) -> None:
    assert high.is_contiguous()
    assert low.is_contiguous()
    _write(values, high, low, None, None)


def rounded(values: Tensor, place: Place, step: Tensor) -> Tensor:
    """bfloat16 of float32, by the bits of these places in this step."""
    found = torch.empty_like(values, dtype=torch.bfloat16)
    _write(values, found, None, step, place)
    return found


def _write(values: Tensor, high: Tensor, low: Tensor | None, step: Tensor | None, place: Place | None) -> None:
    _halves_write[(triton.cdiv(high.numel(), BLOCK),)](
        values.contiguous(), as_bits(high), low, step, place_for(high, low=low, place=place), high.numel(),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
