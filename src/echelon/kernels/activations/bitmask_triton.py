"""Bitmask kernels: a program processes a chunk of a row, eight elements per byte."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from echelon.kernels.kernel_launch import launch
from echelon.kernels.tensor_spec import split_row


@triton.jit
def _bits_offsets(row, chunks, CHUNK: tl.constexpr):
    """Return (element offsets, their mask, byte offsets, their mask) of the program."""
    program = tl.program_id(0)
    line, start = (program // chunks).to(tl.int64), program % chunks * CHUNK  # division of 64 bits is slow
    at = start + tl.arange(0, CHUNK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    byte, width = start // 8 + tl.arange(0, CHUNK // 8), (row + 7) // 8
    return line * row + at, at < row, line * width + byte, byte < width


@triton.jit
def _bits_block_offsets(chunks, blocks, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """Return (block indices, their mask) of the program."""
    program = tl.program_id(0)
    block = program % chunks * (CHUNK // SIZE) + tl.arange(0, CHUNK // SIZE)
    return (program // chunks).to(tl.int64) * blocks + block, block < blocks


@triton.jit
def _store_bits(bits_ptr, at, inside, flags):
    """Pack flags [n, 8], 0 or 1, into bytes."""
    byte = tl.sum(flags << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits_ptr + at, byte.to(tl.uint8), mask=inside)


@triton.jit
def _load_bits(bits_ptr, at, inside):
    byte = tl.load(bits_ptr + at, mask=inside, other=0).to(tl.int32)
    return (byte[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def _bits_relu(x_ptr, y_ptr, bits_ptr, counts_ptr, row, chunks, blocks, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    is_zero = x <= 0  # false for NaN
    tl.store(y_ptr + at, tl.where(is_zero, 0.0, x), mask=inside)
    flags = tl.where(is_zero, 0, 1)
    _store_bits(bits_ptr, byte, there, flags)
    count = tl.sum(tl.reshape(tl.sum(flags, axis=1), (CHUNK // SIZE, SIZE // 8)), axis=1)
    block, some = _bits_block_offsets(chunks, blocks, CHUNK, SIZE)
    tl.store(counts_ptr + block, count, mask=some)


@triton.jit
def _bits_masked(gradient_ptr, bits_ptr, out_ptr, row, chunks, CHUNK: tl.constexpr):
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    flags = _load_bits(bits_ptr, byte, there) != 0
    # Load every element: a per-element mask would prevent vectorised loads.
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.where(flags, gradient, 0.0), mask=inside)


@triton.jit
def _bits_pack(flags_ptr, bits_ptr, row, chunks, CHUNK: tl.constexpr):
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    _store_bits(bits_ptr, byte, there, tl.load(flags_ptr + at, mask=inside, other=0).to(tl.int32))


@triton.jit
def _bits_unpack(bits_ptr, flags_ptr, row, chunks, CHUNK: tl.constexpr):
    at, inside, byte, there = _bits_offsets(row, chunks, CHUNK)
    tl.store(flags_ptr + at, _load_bits(bits_ptr, byte, there).to(tl.uint8), mask=inside)


def _launch(kernel: Any, like: Tensor, *tensors: Tensor) -> None:
    split = split_row(like.shape[1])
    launch(kernel, len(like) * split.num_chunks, *tensors, split.size, split.num_chunks, CHUNK=split.chunk_size)


def _empty_bitmask(like: Tensor) -> Tensor:
    return torch.empty(like.shape[0], (like.shape[1] + 7) // 8, dtype=torch.uint8, device=like.device)


def relu(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Write ReLU of x [rows, n] to y, which may be x; return (its bitmask, nonzeros per block)."""
    rows, split = len(x), split_row(x.shape[1])
    bits, counts = _empty_bitmask(x), x.new_empty(rows * split.num_blocks, dtype=torch.int32)
    launch(_bits_relu, rows * split.num_chunks, x, y, bits, counts, *split.numbers, **split.constants)
    return bits, counts


def mask_gradient(gradient: Tensor, bits: Tensor, out: Tensor) -> None:
    _launch(_bits_masked, gradient, gradient, bits, out)


def pack(flags: Tensor) -> Tensor:
    bits = _empty_bitmask(flags)
    _launch(_bits_pack, flags, flags.view(torch.uint8), bits)
    return bits


def unpack(bits: Tensor, out: Tensor) -> None:
    _launch(_bits_unpack, out, bits, out.view(torch.uint8))
