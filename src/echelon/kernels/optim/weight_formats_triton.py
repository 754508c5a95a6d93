"""What kernels of updates share: weights are read and written in their three forms, and the bits drawn that round them.

    low_ptr       is given: float32 in two halves (halves.py)
    place_ptr     is given: something in bfloat16 alone is rounded by chance (adamw.py)
    neither       what is written is float32

bfloat16 comes as int16, its bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.optim.fused_adamw import ElementIndices

BLOCK = 1024
"""elements of a program: 8 of each thread's, one load of 16 bytes in 16 bits"""
WARPS = 4


@triton.jit
def float_bits(x):
    """int32 of float32, every NaN the quiet one."""
    return tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def element_offsets(size, BLOCK: tl.constexpr):
    """(the program's elements, which of them there are)"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < size


@triton.jit
def random_bits(at, step_ptr, place_ptr):
    """32 random bits of each element, where something is rounded."""
    chance = 0
    if place_ptr is not None:
        place = at + tl.load(place_ptr)
        inner = tl.load(place_ptr + 3)
        if inner > 0:
            rows, middle = place // inner, tl.load(place_ptr + 2)
            place = (rows // middle) * tl.load(place_ptr + 4) + (rows % middle) * tl.load(place_ptr + 5) + place % inner
        turned = _hash32(tl.load(step_ptr).to(tl.uint32) ^ tl.load(place_ptr + 1).to(tl.uint32))
        chance = _hash32((place + tl.load(place_ptr + 6)).to(tl.uint32) ^ turned)
    return chance


@triton.jit
def load_fp32(ptr, at, inside):
    """In float32."""
    x = tl.load(ptr + at, mask=inside, other=0)
    if ptr.dtype.element_ty == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def store_rounded(ptr, at, inside, x, chance, SHIFT: tl.constexpr):
    """bfloat16 is rounded by 16 of the bits that were drawn."""
    if ptr.dtype.element_ty == tl.int16:
        x = ((float_bits(x) + ((chance >> SHIFT) & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16)
    tl.store(ptr + at, x, mask=inside)


@triton.jit
def load_weights(high_ptr, low_ptr, at, inside):
    w = load_fp32(high_ptr, at, inside)
    if low_ptr is not None:
        low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32)
        w = (w.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    return w


@triton.jit
def store_weights(high_ptr, low_ptr, at, inside, w, chance):
    if low_ptr is not None:
        bits = float_bits(w)
        upper = (bits + 0x8000) >> 16
        tl.store(high_ptr + at, upper.to(tl.int16), mask=inside)
        tl.store(low_ptr + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        if high_ptr.dtype.element_ty == tl.int16:
            chance = _hash32(chance ^ 0x9E3779B9)  # the first bits are the moments'
        store_rounded(high_ptr, at, inside, w, chance, 0)


def view_as_int16(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def rounding_indices(
    *written: Tensor | None, indices: ElementIndices | None, low: Tensor | None = None
) -> Tensor | None:
    """`place_ptr`, if one of these tensors is rounded; the first is the weights, which with `low` are not."""
    rounded = [tensor for tensor in written[low is not None :] if tensor is not None and tensor.dtype == torch.bfloat16]
    if not rounded:
        return None
    assert indices is not None
    return _indices_tensor(indices, rounded[0].device)


@cache
def _indices_tensor(indices: ElementIndices, device: torch.device) -> Tensor:
    """Made once: seven numbers as arguments would be seven more of every start, and of every kernel's kinds."""
    return torch.tensor([indices.start, indices.key, *indices.sizes, *indices.strides, indices.base], device=device)
