"""loss.py's kernel: a program takes one row of logits; its second reading is out of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""logits at a time"""
IGNORED = -100


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
    # The largest so far and the sum of exponentials relative to it, each lane for itself.
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
    peak = tl.max(largest, axis=0)
    total_sum = tl.sum(total * tl.exp(largest - peak), axis=0)
    tl.store(losses_ptr + row, tl.log(total_sum) - (tl.load(logits_ptr + target).to(tl.float32) - peak))
    if BACKWARD:
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < WIDTH
            x = tl.load(logits_ptr + column, mask=mask, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - peak) / total_sum - tl.where(column == target, 1.0, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


def losses(logits: Tensor, targets: Tensor, backward: bool) -> Tensor:
    """The cross entropy of each row; with `backward` its gradient takes the logits' place."""
    out = logits.new_empty(len(logits), dtype=torch.float32)
    _loss_and_gradient[(len(logits),)](
        logits, targets, out, logits.stride(0),
        WIDTH=logits.shape[1], IGNORED=IGNORED, BACKWARD=backward, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return out
