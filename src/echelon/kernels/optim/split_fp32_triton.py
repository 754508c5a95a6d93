"""Kernels that join and split fp32 halves, and round stochastically, for optimizers that are not one kernel."""

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
    load_weights,
    random_bits,
    rounding_indices,
    store_weights,
    view_as_int16,
)


@triton.jit
def _halves_join(high_ptr, low_ptr, values_ptr, size, BLOCK: tl.constexpr):
    at, mask = element_offsets(size, BLOCK)
    tl.store(values_ptr + at, load_weights(high_ptr, low_ptr, at, mask), mask=mask)


@triton.jit
def _halves_write(values_ptr, high_ptr, low_ptr, step_ptr, indices_ptr, size, BLOCK: tl.constexpr):
    at, mask = element_offsets(size, BLOCK)
    values = tl.load(values_ptr + at, mask=mask, other=0.0)
    store_weights(high_ptr, low_ptr, at, mask, values, random_bits(at, step_ptr, indices_ptr))


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    high, low = high.contiguous(), low.contiguous()
    values = torch.empty_like(high, dtype=torch.float32)
    _halves_join[(triton.cdiv(high.numel(), BLOCK),)](
        view_as_int16(high), low, values, high.numel(), BLOCK=BLOCK, num_warps=WARPS
    )
    return values


def split_halves(values: Tensor, high: Tensor, low: Tensor) -> None:
    assert high.is_contiguous()
    assert low.is_contiguous()
    _write_halves(values, high, low, None, None)


def stochastic_round(values: Tensor, indices: ElementIndices, step: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, by the random bits of these elements in this step."""
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    _write_halves(values, rounded, None, step, indices)
    return rounded


def _write_halves(
    values: Tensor, high: Tensor, low: Tensor | None, step: Tensor | None, indices: ElementIndices | None
) -> None:
    _halves_write[(triton.cdiv(high.numel(), BLOCK),)](
        *(values.contiguous(), view_as_int16(high), low, step, rounding_indices(high, low=low, indices=indices)),
        high.numel(),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
