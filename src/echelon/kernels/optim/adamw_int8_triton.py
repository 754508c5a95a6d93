"""optim/rules/adamw_int8.py's kernel: AdamW whose moments are codes in 8 bits and the largest of each block (optim/blockwise_quantization.py).

A program takes a few blocks, a warp each, so that the largest of a block is found without leaving the warp. They lie in
one row: for gathers from a table out of rows and columns, Triton would move everything to other threads and back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.fused_adamw import ElementIndices
from echelon.kernels.optim.fused_adamw_triton import adamw_step
from echelon.kernels.optim.weight_formats_triton import (
    WARPS,
    element_offsets,
    float_bits,
    load_fp32,
    load_weights,
    random_bits,
    rounding_indices,
    store_weights,
    view_as_int16,
)

Int8MomentTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""codes, the largest of each block, the 256 values that codes stand for, and the 255 borders between them"""
TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _nearest_code(share, borders_ptr):
    """How many of the 255 borders lie below: `torch.bucketize`, which counts all of them for what is not a number."""
    code = tl.zeros_like(share).to(tl.int32)
    for bit in tl.static_range(8):
        half = 128 >> bit
        code += tl.where(tl.load(borders_ptr + (code + (half - 1))) >= share, 0, half)
    return code


@triton.jit
def _dequantize_blocks(kept, at, inside, EACH: tl.constexpr):
    codes_ptr, largest_ptr, values_ptr, _ = kept
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    share = tl.load(values_ptr + code, mask=inside, other=0.0)
    return share * tl.load(largest_ptr + at // EACH, mask=inside, other=0.0)


@triton.jit
def _quantize_blocks(kept, at, inside, size, x, tiny, BLOCKS: tl.constexpr, EACH: tl.constexpr):
    codes_ptr, largest_ptr, _, borders_ptr = kept
    # As bits: a maximum of floats would pass over what is not a number, whose bits are the largest of all.
    # Elements that are not there were read as 0, and still are.
    bits = tl.reshape(float_bits(tl.abs(x)), (BLOCKS, EACH))
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(largest_ptr + block, largest, mask=block * EACH < size)
    inverse = tl.div_rn(1.0, tl.where(largest < tiny, tiny, largest))
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, EACH)), (BLOCKS * EACH,))
    tl.store(codes_ptr + at, _nearest_code(x * inverse, borders_ptr).to(tl.uint8), mask=inside)


@triton.jit
def _adamw_int8(
    high_ptr, low_ptr, mean, square, gradient_ptr, numbers_ptr, step_ptr, place_ptr, size, tiny,
    BLOCKS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """`mean` and `square`: pointers of what is kept."""
    if tl.load(numbers_ptr + 9) == 0:
        return
    at, inside = element_offsets(size, BLOCKS * EACH)
    m, v = _dequantize_blocks(mean, at, inside, EACH), _dequantize_blocks(square, at, inside, EACH)
    w = load_weights(high_ptr, low_ptr, at, inside)
    w, m, v = adamw_step(w, m, v, load_fp32(gradient_ptr, at, inside), tl.load(numbers_ptr + 7), numbers_ptr)
    store_weights(high_ptr, low_ptr, at, inside, w, random_bits(at, step_ptr, place_ptr))
    _quantize_blocks(mean, at, inside, size, m, tiny, BLOCKS, EACH)
    _quantize_blocks(square, at, inside, size, v, tiny, BLOCKS, EACH)


def update(
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
    """As in optim/rules/adamw_int8.py, for arithmetic in float32; `each` is the size of a block."""
    _adamw_int8[(triton.cdiv(len(high), WARPS * block_size),)](
        view_as_int16(high), low, exp_avg, exp_avg_sq, view_as_int16(gradient), constants, step, rounding_indices(high, low=low, indices=indices),
        len(high), TINY, BLOCKS=WARPS, EACH=block_size, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
