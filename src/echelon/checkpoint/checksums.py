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

from echelon.checkpoint.tensor_slices import Ranges, rows_of

Sums = tuple[int, int]
MASK = (1 << 64) - 1
CHUNK = 1 << 17
"""words at a time, which stay in a core's cache"""
COLUMNS = 2048
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of(values: Tensor, box: Ranges, shape: Sequence[int]) -> Sums:
    """Of a box of a logical tensor of some shape; `values` are its elements, dense, on the CPU."""
    size = values.element_size()
    bits = values.reshape(-1).view(INTEGERS[size])
    rows = rows_of(box, tuple((0, side) for side in shape))
    a = b = 0
    if len(rows.starts) > 1 and rows.length * size % 8 == 0 and all(start * size % 8 == 0 for start in rows.starts):
        first = torch.tensor(rows.starts, dtype=torch.int64) * size // 8
        return _words(_as_words(bits).view(len(first), -1), first)
    if len(rows.starts) > 1 and rows.length < COLUMNS:
        places = torch.tensor(rows.starts, dtype=torch.int64)[:, None] + torch.arange(rows.length)
        return _elements(bits, places.reshape(-1), size)
    for number, start in enumerate(rows.starts):
        found = _run(bits[number * rows.length : (number + 1) * rows.length], start, size)
        a, b = a + found[0], b + found[1]
    return a & MASK, b & MASK


def _run(bits: Tensor, start: int, size: int) -> Sums:
    """Elements that lie side by side in the logical tensor."""
    head = min(-start % (8 // size), len(bits))
    body = (len(bits) - head) * size // 8 * 8 // size
    table = body * size // 8 // COLUMNS * COLUMNS * 8 // size
    a, b = 0, 0
    if table:
        words = _as_words(bits[head : head + table]).view(-1, COLUMNS)
        first = (start + head) * size // 8 + torch.arange(len(words)) * COLUMNS
        a, b = _words(words, first)
    for begin, end in ((0, head), (head + table, len(bits))):
        if begin < end:
            found = _elements(bits[begin:end], torch.arange(start + begin, start + end), size)
            a, b = a + found[0], b + found[1]
    return a & MASK, b & MASK


def _as_words(bits: Tensor) -> Tensor:
    if bits.data_ptr() % 8 or bits.storage_offset() * bits.element_size() % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


def _words(words: Tensor, first: Tensor) -> Sums:
    """Rows of words, each with the place of its first word. Whole numbers wrap around, as they should."""
    many = max(1, CHUNK // max(words.shape[1], 1))
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


def _elements(bits: Tensor, places: Tensor, size: int) -> Sums:
    """One by one."""
    a, b = 0, 0
    for begin in range(0, len(bits), CHUNK):
        at = places[begin : begin + CHUNK] * size
        values = bits[begin : begin + CHUNK].to(torch.int64)
        if size < 8:
            values = (values & ((1 << 8 * size) - 1)) << (at % 8 * 8)
        a += int(values.sum())
        b += int((values * (at // 8)).sum())
    return a & MASK, b & MASK


def added(sums: Sequence[Sums]) -> Sums:
    return sum(a for a, _ in sums) & MASK, sum(b for _, b in sums) & MASK


def signed(number: int) -> int:
    """As an int64 holds it."""
    return number - (1 << 64) if number >> 63 else number


def hash_of(sums: Mapping[str, Sums]) -> str:
    """Of a whole state: of every tensor's name and sums."""
    text = "\n".join(f"{name} {a:016x} {b:016x}" for name, (a, b) in sorted(sums.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
