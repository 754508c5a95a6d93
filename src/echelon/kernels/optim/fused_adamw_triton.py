"""Fused AdamW kernels: a program processes a block of elements. `constants` are those of fused_adamw.py.

With int8 moments (optim/rules/adamw_int8.py: codes, and the absolute maximum of each block) a program processes a few
blocks, one per warp, so that the maximum of a block needs no communication between warps. Blocks are in one row: to
gather from a table by rows and columns, Triton would move all values to other threads and back.
"""

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
    float_bits,
    load_fp32,
    load_weights,
    random_bits,
    rounding_indices,
    store_rounded,
    store_weights,
    view_as_int16,
)

Int8MomentTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""(codes, amax of each block, the 256 values of the codebook, the 255 boundaries between them)"""
TINY = torch.finfo(torch.float32).tiny


@triton.jit
def adamw_step(w, exp_avg, exp_avg_sq, gradient, decay_factor, constants_ptr):
    """Return (weights, exp_avg, exp_avg_sq) after the step."""
    g = gradient * tl.load(constants_ptr + 8)
    m = exp_avg * tl.load(constants_ptr + 0) + g * tl.load(constants_ptr + 1)
    v = exp_avg_sq * tl.load(constants_ptr + 2) + g * g * tl.load(constants_ptr + 3)
    denominator = tl.sqrt_rn(v) * tl.load(constants_ptr + 6) + tl.load(constants_ptr + 4)
    return w * decay_factor - tl.div_rn(m * tl.load(constants_ptr + 5), denominator), m, v


@triton.jit(do_not_specialize=["num_decayed"])
def _adamw(
    high_ptr, low_ptr, exp_avg_ptr, exp_avg_sq_ptr, gradient_ptr, constants_ptr, step_ptr, indices_ptr,
    size, num_decayed, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(constants_ptr + 9) == 0:
        return
    at, mask = element_offsets(size, BLOCK)
    w = load_weights(high_ptr, low_ptr, at, mask)
    exp_avg, exp_avg_sq = load_fp32(exp_avg_ptr, at, mask), load_fp32(exp_avg_sq_ptr, at, mask)
    decay_factor = tl.where(at < num_decayed, tl.load(constants_ptr + 7), 1.0)
    w, m, v = adamw_step(w, exp_avg, exp_avg_sq, load_fp32(gradient_ptr, at, mask), decay_factor, constants_ptr)
    bits = random_bits(at, step_ptr, indices_ptr)
    store_weights(high_ptr, low_ptr, at, mask, w, bits)
    store_rounded(exp_avg_ptr, at, mask, m, bits, 0)
    store_rounded(exp_avg_sq_ptr, at, mask, v, bits, 16)


@triton.jit
def _nearest_code(normalized, boundaries_ptr):
    """Count the boundaries below each value, as `torch.bucketize`, which counts all 255 for NaN."""
    code = tl.zeros_like(normalized).to(tl.int32)
    for bit in tl.static_range(8):
        half = 128 >> bit
        code += tl.where(tl.load(boundaries_ptr + (code + (half - 1))) >= normalized, 0, half)
    return code


@triton.jit
def _dequantize_blocks(moment, at, mask, EACH: tl.constexpr):
    codes_ptr, amax_ptr, values_ptr, _ = moment
    code = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32)
    normalized = tl.load(values_ptr + code, mask=mask, other=0.0)
    return normalized * tl.load(amax_ptr + at // EACH, mask=mask, other=0.0)


@triton.jit
def _quantize_blocks(moment, at, mask, size, x, tiny, BLOCKS: tl.constexpr, EACH: tl.constexpr):
    codes_ptr, amax_ptr, _, boundaries_ptr = moment
    # As integer bits: a float maximum would ignore NaN, whose bits are the amax of all.
    # Out-of-bounds elements were loaded as 0, and still are.
    bits = tl.reshape(float_bits(tl.abs(x)), (BLOCKS, EACH))
    amax = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(amax_ptr + block, amax, mask=block * EACH < size)
    inverse = tl.div_rn(1.0, tl.where(amax < tiny, tiny, amax))
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, EACH)), (BLOCKS * EACH,))
    tl.store(codes_ptr + at, _nearest_code(x * inverse, boundaries_ptr).to(tl.uint8), mask=mask)


@triton.jit
def _adamw_int8(
    high_ptr, low_ptr, exp_avg, exp_avg_sq, gradient_ptr, constants_ptr, step_ptr, indices_ptr, size, tiny,
    BLOCKS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """`exp_avg` and `exp_avg_sq` are tuples of the pointers of `Int8MomentTensors`."""
    if tl.load(constants_ptr + 9) == 0:
        return
    at, mask = element_offsets(size, BLOCKS * EACH)
    m, v = _dequantize_blocks(exp_avg, at, mask, EACH), _dequantize_blocks(exp_avg_sq, at, mask, EACH)
    w = load_weights(high_ptr, low_ptr, at, mask)
    w, m, v = adamw_step(w, m, v, load_fp32(gradient_ptr, at, mask), tl.load(constants_ptr + 7), constants_ptr)
    store_weights(high_ptr, low_ptr, at, mask, w, random_bits(at, step_ptr, indices_ptr))
    _quantize_blocks(exp_avg, at, mask, size, m, tiny, BLOCKS, EACH)
    _quantize_blocks(exp_avg_sq, at, mask, size, v, tiny, BLOCKS, EACH)


def update(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    *,
    num_decayed: int,
    indices: ElementIndices,
) -> None:
    """Update as `fused_adamw.update`, with float32 arithmetic."""
    rounding = rounding_indices(high, exp_avg, low=low, indices=indices)
    _adamw[(triton.cdiv(len(high), BLOCK),)](
        *(view_as_int16(high), low, view_as_int16(exp_avg), view_as_int16(exp_avg_sq), view_as_int16(gradient)),
        constants, step, rounding, len(high), num_decayed,
        BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def update_int8(
    high: Tensor,
    low: Tensor | None,
    exp_avg: Int8MomentTensors,
    exp_avg_sq: Int8MomentTensors,
    gradient: Tensor,
    constants: Tensor,
    step: Tensor,
    *,
    block_size: int,
    indices: ElementIndices,
) -> None:
    """Update as `adamw_int8.update`, with float32 arithmetic."""
    _adamw_int8[(triton.cdiv(len(high), WARPS * block_size),)](
        *(view_as_int16(high), low, exp_avg, exp_avg_sq, view_as_int16(gradient), constants, step),
        rounding_indices(high, low=low, indices=indices),
        len(high), TINY, BLOCKS=WARPS, EACH=block_size, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
