"""Cross entropy kernels: one program per token; its second read of the logits hits the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.layers.cross_entropy import ALIGNED_ROWS, IGNORE_INDEX

BLOCK = 8192
"""logits that a program loads at a time"""
SCALE_BLOCK = 2048
"""elements that a program of `scale_into` processes"""


@triton.jit
def _loss_and_gradient(
    logits_ptr, targets_ptr, losses_ptr, stride, WIDTH: tl.constexpr, READABLE: tl.constexpr, IGNORED: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Memory is read and written up to READABLE: a mask that ends at an odd width would split vectors of elements."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if BACKWARD:
            for start in range(0, WIDTH, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(logits_ptr + column, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=column < READABLE)
        return
    # The running maximum, and in each lane the sum of exponentials relative to it.
    peak = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < READABLE, other=float("-inf"), eviction_policy="evict_last")
        wide = tl.where(column < WIDTH, x.to(tl.float32), float("-inf"))
        higher = tl.maximum(peak, tl.max(wide, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # all logits so far are -inf
        total = total * tl.exp(peak - shift) + tl.exp(wide - shift)
        peak = higher
    denominator = tl.sum(total, axis=0)
    # A target outside the vocabulary has no logit: its loss is NaN, and the step is skipped.
    target_logit = tl.load(logits_ptr + target, mask=(target >= 0) & (target < WIDTH), other=float("nan"))
    tl.store(losses_ptr + row, tl.log(denominator) - (target_logit.to(tl.float32) - peak))
    if BACKWARD:
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        share = 1.0 / denominator
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < READABLE
            x = tl.load(logits_ptr + column, mask=mask, other=float("-inf"), eviction_policy="evict_first")
            wide = tl.where(column < WIDTH, x.to(tl.float32), float("-inf"))
            gradient = tl.exp(wide - peak) * share - tl.where(column == target, 1.0, 0.0)
            tl.store(
                logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first"
            )


@triton.jit
def _loss_scaled(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < size)


def scale_into(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write x times a scalar to `out`, rounded once to its dtype; torch's mixed-dtype mul is not vectorised."""
    grid = (triton.cdiv(x.numel(), SCALE_BLOCK),)
    _loss_scaled[grid](x, scale, out, x.numel(), BLOCK=SCALE_BLOCK, num_warps=4)
    return out


def cross_entropy_rows(logits: Tensor, targets: Tensor, backward: bool) -> Tensor:
    """Return the cross entropy of each row; with `backward` overwrite the logits with its gradient.

    Elements between a row's end and the next row may be overwritten with 0.
    """
    out = logits.new_empty(len(logits), dtype=torch.float32)
    stride, width = logits.stride(0), logits.shape[1]
    readable = triton.cdiv(width, ALIGNED_ROWS) * ALIGNED_ROWS
    _loss_and_gradient[(len(logits),)](
        logits, targets, out, stride,
        WIDTH=width, READABLE=readable if readable <= stride else width, IGNORED=IGNORE_INDEX, BACKWARD=backward,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return out
