"""A check sum of a logical tensor that does not depend on how it is cut.

[Note: words by their place]

A tensor's bytes are read as words of 64 bits, by their place in the whole tensor: word k holds the bytes 8k to 8k + 7.
Kept are two sums, modulo 2^64:

    a = sum of the words                          changes whenever one byte does
    b = sum of k x word k                         changes when parts change places

An element adds its own bits, shifted to where it lies in its word. So sums of boxes add up to those of the tensor,
however it is cut, and a rank can check what it has read without reading anything else. It tells accidents, not forgery.
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
"""words at a time, which stay in a core's cache"""
TABLE_COLUMNS = 2048
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def box_checksum(values: Tensor, box: Box, shape: Sequence[int]) -> Checksum:
    """Of a box of a logical tensor of some shape; `values` are its elements, dense, on the CPU."""
    size = values.element_size()
    bits = values.reshape(-1).view(INTEGER_DTYPES[size])
    rows = contiguous_rows(box, tuple((0, side) for side in shape))
    a = b = 0
    if len(rows.starts) > 1 and rows.length * size % 8 == 0 and all(start * size % 8 == 0 for start in rows.starts):
        first = torch.tensor(rows.starts, dtype=torch.int64) * size // 8
        return _word_checksum(_as_words(bits).view(len(first), -1), first)
    if len(rows.starts) > 1 and rows.length < TABLE_COLUMNS:
        places = torch.tensor(rows.starts, dtype=torch.int64)[:, None] + torch.arange(rows.length)
        return _element_checksum(bits, places.reshape(-1), size)
    for number, start in enumerate(rows.starts):
        found = _run_checksum(bits[number * rows.length : (number + 1) * rows.length], start, size)
        a, b = a + found[0], b + found[1]
    return a & MASK, b & MASK


def _run_checksum(bits: Tensor, start: int, size: int) -> Checksum:
    """Elements that lie side by side in the logical tensor."""
    head = min(-start % (8 // size), len(bits))
    body = (len(bits) - head) * size // 8 * 8 // size
    table = body * size // 8 // TABLE_COLUMNS * TABLE_COLUMNS * 8 // size
    a, b = 0, 0
    if table:
        words = _as_words(bits[head : head + table]).view(-1, TABLE_COLUMNS)
        first = (start + head) * size // 8 + torch.arange(len(words)) * TABLE_COLUMNS
        a, b = _word_checksum(words, first)
    for begin, end in ((0, head), (head + table, len(bits))):
        if begin < end:
            found = _element_checksum(bits[begin:end], torch.arange(start + begin, start + end), size)
            a, b = a + found[0], b + found[1]
    return a & MASK, b & MASK


def _as_words(bits: Tensor) -> Tensor:
    if bits.data_ptr() % 8 or bits.storage_offset() * bits.element_size() % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


def _word_checksum(words: Tensor, first: Tensor) -> Checksum:
    """Rows of words, each with the place of its first word. Whole numbers wrap around, as they should."""
    many = max(1, CHUNK_WORDS // max(words.shape[1], 1))
    a, b = 0, 0
    columns = np.zeros(words.shape[1], dtype=np.int64)
    # NumPy keeps to one thread: this runs beside training, which wants the others.
    table, places = words.numpy(), first.numpy()
    for begin in range(0, len(table), many):
        part = table[begin : begin + many]
        sums = part.sum(1)
        columns += part.sum(0)
        a += int(sums.sum())
        b += int((sums * places[begin : begin + many]).sum())
    b += int((columns * np.arange(len(columns))).sum())
    return a & MASK, b & MASK


def _element_checksum(bits: Tensor, places: Tensor, size: int) -> Checksum:
    """One by one."""
    a, b = 0, 0
    for begin in range(0, len(bits), CHUNK_WORDS):
        at = places[begin : begin + CHUNK_WORDS] * size
        values = bits[begin : begin + CHUNK_WORDS].to(torch.int64)
        if size < 8:
            values = (values & ((1 << 8 * size) - 1)) << (at % 8 * 8)
        a += int(values.sum())
        b += int((values * (at // 8)).sum())
    return a & MASK, b & MASK


def add_checksums(checksums: Sequence[Checksum]) -> Checksum:
    return sum(a for a, _ in checksums) & MASK, sum(b for _, b in checksums) & MASK


def as_int64(number: int) -> int:
    """As an int64 holds it."""
    return number - (1 << 64) if number >> 63 else number


def state_hash(checksums: Mapping[str, Checksum]) -> str:
    """Of a whole state: of every tensor's name and sums."""
    text = "\n".join(f"{name} {a:016x} {b:016x}" for name, (a, b) in sorted(checksums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
