"""Blockwise attention kernels: a program merges all partial results of some heads of some tokens."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import row_block

ROWS_PER_PROGRAM = 32
"""with head_dim 128, each thread of 4 warps has 32 elements"""


@triton.jit
def _row_offsets(length, HEADS: tl.constexpr, TOKENS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Return (batch, heads, tokens, in-bounds mask) of the program's rows."""
    head_blocks: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, TOKENS * HEAD_BLOCK)
    head = program % head_blocks * HEAD_BLOCK + row % HEAD_BLOCK
    t = program // head_blocks * TOKENS + row // HEAD_BLOCK
    return tl.program_id(1).to(tl.int64), head, t, (head < HEADS) & (t < length)


@triton.jit
def _element_offsets(stride, batch, head, t, BLOCK: tl.constexpr):
    return (batch * stride[0] + head * stride[1] + t * stride[2])[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _blocks_merge(
    to, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`to` and each part are (pointer of out, its strides, pointer of lse, its strides)."""
    batch, head, t, inside = _row_offsets(length, HEADS, TOKENS, HEAD_BLOCK)
    column = (tl.arange(0, BLOCK) < WIDTH)[None, :]
    peak = tl.full((TOKENS * HEAD_BLOCK,), -float("inf"), tl.float32)
    for i in tl.static_range(len(parts)):
        _, _, lse_ptr, stride = parts[i]
        lse = tl.load(lse_ptr + batch * stride[0] + head * stride[1] + t, mask=inside, other=-float("inf"))
        peak = tl.maximum(peak, lse)
    fully_masked = peak == -float("inf")
    base = tl.where(fully_masked, 0.0, peak)  # exp(-inf - 0) is 0
    denominator = tl.where(fully_masked, 1.0, 0.0)
    out = tl.zeros((TOKENS * HEAD_BLOCK, BLOCK), tl.float32)
    for i in tl.static_range(len(parts)):
        ptr, stride, lse_ptr, lse_stride = parts[i]
        at = batch * lse_stride[0] + head * lse_stride[1] + t
        weight = tl.exp(tl.load(lse_ptr + at, mask=inside, other=-float("inf")) - base)
        denominator += weight
        # Rows of weight 0 are not read: they may not be written yet.
        seen = (weight > 0)[:, None] & column
        x = tl.load(ptr + _element_offsets(stride, batch, head, t, BLOCK), mask=seen, other=0.0)
        out += weight[:, None] * x.to(tl.float32)
    ptr, stride, lse_ptr, lse_stride = to
    out = (out / denominator[:, None]).to(ptr.dtype.element_ty)
    tl.store(ptr + _element_offsets(stride, batch, head, t, BLOCK), out, mask=inside[:, None] & column)
    tl.store(lse_ptr + batch * lse_stride[0] + head * lse_stride[1] + t, peak + tl.log(denominator), mask=inside)


@triton.jit
def _blocks_sum(
    to, parts, length,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`to` and each part are (pointer, strides)."""
    batch, head, t, inside = _row_offsets(length, HEADS, TOKENS, HEAD_BLOCK)
    mask = inside[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    out = tl.zeros((TOKENS * HEAD_BLOCK, BLOCK), tl.float32)
    for i in tl.static_range(len(parts)):
        ptr, stride = parts[i]
        out += tl.load(ptr + _element_offsets(stride, batch, head, t, BLOCK), mask=mask, other=0.0).to(tl.float32)
    ptr, stride = to
    tl.store(ptr + _element_offsets(stride, batch, head, t, BLOCK), out.to(ptr.dtype.element_ty), mask=mask)


def combine_parts(target: tuple[Tensor, ...], parts: list[tuple[Tensor, ...]]) -> None:
    """Write the merged parts to `target`, which may be one of them."""
    batch, heads, length, head_dim = target[0].shape
    # Where the heads of a token are adjacent in memory, a program processes several heads.
    head_block = min(8, row_block(heads)) if target[0].stride(1) < target[0].stride(2) else 1
    tokens = ROWS_PER_PROGRAM // head_block
    kernel: Any = _blocks_merge if len(target) > 1 else _blocks_sum
    kernel[(triton.cdiv(heads, head_block) * triton.cdiv(length, tokens), batch)](
        _pointers_and_strides(target), tuple(_pointers_and_strides(part) for part in parts), length,
        HEADS=heads, WIDTH=head_dim, TOKENS=tokens, HEAD_BLOCK=head_block, BLOCK=row_block(head_dim), num_warps=4,
    )  # fmt: skip


def _pointers_and_strides(part: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return pointers and strides; the last dim is contiguous."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in part]
    return tuple(each for x in dense for each in (x, x.stride()[:-1]))
