"""A checksum of a logical tensor that does not depend on how the tensor is sharded.

[Note: words by their position]

A tensor's bytes are read as 64-bit words by their position in the logical tensor: word k is the bytes 8k to 8k + 7.
The checksum is two sums modulo 2^64:

    a = sum of the words                          changes whenever one byte does
    b = sum of k x word k                         changes when parts swap positions

An element adds its own bits, shifted to its position in the word. So the checksums of boxes add up to that of the
tensor, however it is sharded, and a rank can check what it has read without reading more. It detects accidents, not
tampering.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint.tensor_slices import Box, contiguous_rows

Checksum = tuple[int, int]
MASK = (1 << 64) - 1
CHUNK_WORDS = 1 << 17
"""words at a time, which fit a core's cache"""
TABLE_COLUMNS = 2048
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def box_checksum(values: Tensor, box: Box, shape: Sequence[int]) -> Checksum:
    """The checksum of a box of a logical tensor; `values` are its elements, dense, on the CPU."""
    size = values.element_size()
    bits = values.reshape(-1).view(INTEGER_DTYPES[size])
    rows = contiguous_rows(box, tuple((0, side) for side in shape))
    if len(rows.starts) > 1 and rows.length * size % 8 == 0 and all(start * size % 8 == 0 for start in rows.starts):
        first = torch.tensor(rows.starts, dtype=torch.int64) * size // 8
        return _word_checksum(_as_words(bits).view(len(first), -1), first)
    if len(rows.starts) > 1 and rows.length < TABLE_COLUMNS:
        positions = torch.tensor(rows.starts, dtype=torch.int64)[:, None] + torch.arange(rows.length)
        return _element_checksum(bits, positions.reshape(-1), size)
    runs = [bits[index * rows.length : (index + 1) * rows.length] for index in range(len(rows.starts))]
    return add_checksums([_run_checksum(run, start, size) for run, start in zip(runs, rows.starts, strict=True)])


def _run_checksum(bits: Tensor, start: int, size: int) -> Checksum:
    """The checksum of elements that are contiguous in the logical tensor."""
    head = min(-start % (8 // size), len(bits))
    body = (len(bits) - head) * size // 8 * 8 // size
    table = body * size // 8 // TABLE_COLUMNS * TABLE_COLUMNS * 8 // size
    checksums = [
        _element_checksum(bits[begin:end], torch.arange(start + begin, start + end), size)
        for begin, end in ((0, head), (head + table, len(bits)))
    ]
    if table:
        words = _as_words(bits[head : head + table]).view(-1, TABLE_COLUMNS)
        first = (start + head) * size // 8 + torch.arange(len(words)) * TABLE_COLUMNS
        checksums.append(_word_checksum(words, first))
    return add_checksums(checksums)


def _as_words(bits: Tensor) -> Tensor:
    if bits.data_ptr() % 8 or bits.storage_offset() * bits.element_size() % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


def _word_checksum(words: Tensor, first: Tensor) -> Checksum:
    """The checksum of rows of words, given the position of each row's first word; int64 overflow is intended."""
    num_rows = max(1, CHUNK_WORDS // max(words.shape[1], 1))
    a, b = 0, 0
    columns = np.zeros(words.shape[1], dtype=np.int64)
    # NumPy uses one thread: this runs in the background of training, which uses the others.
    table, positions = words.numpy(), first.numpy()
    for begin in range(0, len(table), num_rows):
        part = table[begin : begin + num_rows]
        sums = part.sum(1)
        columns += part.sum(0)
        a += int(sums.sum())
        b += int((sums * positions[begin : begin + num_rows]).sum())
    b += int((columns * np.arange(len(columns))).sum())
    return a & MASK, b & MASK


def _element_checksum(bits: Tensor, positions: Tensor, size: int) -> Checksum:
    """The checksum of elements at arbitrary positions."""
    a, b = 0, 0
    for begin in range(0, len(bits), CHUNK_WORDS):
        at = positions[begin : begin + CHUNK_WORDS] * size
        values = bits[begin : begin + CHUNK_WORDS].to(torch.int64)
        if size < 8:
            values = (values & ((1 << 8 * size) - 1)) << (at % 8 * 8)
        a += int(values.sum())
        b += int((values * (at // 8)).sum())
    return a & MASK, b & MASK


def add_checksums(checksums: Sequence[Checksum]) -> Checksum:
    return sum(a for a, _ in checksums) & MASK, sum(b for _, b in checksums) & MASK


def as_int64(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def state_hash(checksums: Mapping[str, Checksum]) -> str:
    """The hash of a state: of every tensor's name and checksum."""
    text = "\n".join(f"{name} {a:016x} {b:016x}" for name, (a, b) in sorted(checksums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
