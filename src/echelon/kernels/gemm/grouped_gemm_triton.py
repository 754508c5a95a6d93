"""Kernel that zeroes the rows after the last group; programs before them return at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 256


@triton.jit
def _fill_after(x, end, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    last = tl.load(end)
    first = tl.program_id(0) * ROWS
    if first + ROWS > last:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        after = (row >= last) & (row < rows)
        place = row[:, None] * width + column[None, :]
        tl.store(x + place, 0.0, mask=after[:, None] & (column < width)[None, :])


def zero_rows_after(x: Tensor, offsets: Tensor) -> Tensor:
    """Zero the rows of x [rows, width] from the last of `offsets` on, in place."""
    rows, width = x.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))
    with torch.cuda.device_of(x):
        _fill_after[grid](x, offsets[-1:], rows, width, ROWS=ROWS, COLUMNS=COLUMNS)
    return x
