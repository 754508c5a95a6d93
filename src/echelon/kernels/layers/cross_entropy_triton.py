"""loss.py's kernel: a program takes one row of logits; its second reading is out of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.layers.cross_entropy import IGNORE_INDEX

BLOCK = 8192
"""logits at a time"""
SCALE_BLOCK = 2048
"""elements of a program that multiplies"""


@triton.jit
def _loss_and_gradient(
    logits_ptr, targets_ptr, losses_ptr, stride, WIDTH: tl.constexpr, IGNORED: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if BACKWARD:
            for start in range(0, WIDTH, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(logits_ptr + column, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=column < WIDTH)
        return
    # The largest so far, and in each lane the sum of exponentials relative to it.
    peak = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < WIDTH, other=float("-inf"), eviction_policy="evict_last")
        wide = x.to(tl.float32)
        higher = tl.maximum(peak, tl.max(wide, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # so far there was no logit above minus infinity
        total = total * tl.exp(peak - shift) + tl.exp(wide - shift)
        peak = higher
    whole = tl.sum(total, axis=0)
    # A target that is no token has no logit: its loss is not a number, and the step is left out.
    found = tl.load(logits_ptr + target, mask=(target >= 0) & (target < WIDTH), other=float("nan"))
    tl.store(losses_ptr + row, tl.log(whole) - (found.to(tl.float32) - peak))
    if BACKWARD:
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        share = 1.0 / whole
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < WIDTH
            x = tl.load(logits_ptr + column, mask=mask, other=float("-inf"), eviction_policy="evict_first")
            gradient = tl.exp(x.to(tl.float32) - peak) * share - tl.where(column == target, 1.0, 0.0)
            tl.store(
                logits_ptr + column,
                gradient.to(logits_ptr.dtype.element_ty),
                mask=mask,
                eviction_policy="evict_first",
            )


@triton.jit
def _loss_scaled(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < size)


def scale_into(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """x times a number, rounded once to the type of `out`; torch's own reads and writes one by one across types."""
    grid = (triton.cdiv(x.numel(), SCALE_BLOCK),)
    _loss_scaled[grid](x, scale, out, x.numel(), BLOCK=SCALE_BLOCK, num_warps=4)
    return out


def cross_entropy_rows(logits: Tensor, targets: Tensor, backward: bool) -> Tensor:
    """The cross entropy of each row; with `backward` its gradient takes the logits' place."""
    out = logits.new_empty(len(logits), dtype=torch.float32)
    _loss_and_gradient[(len(logits),)](
        logits, targets, out, logits.stride(0),
        WIDTH=logits.shape[1], IGNORED=IGNORE_INDEX, BACKWARD=backward, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return out
