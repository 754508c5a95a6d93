"""How kernels that take whole rows are launched."""

from __future__ import annotations

import torch

PER_PROCESSOR = 4
"""programs that a multiprocessor has at once where each goes over many rows"""


def row_block(width: int) -> int:
    """The power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def warps(block: int) -> int:
    """So that a thread has 16 elements: two loads of 16 bytes in 16 bits."""
    return min(max(block // 512, 1), 16)


def programs(rows: int, device: torch.device) -> int:
    """As many as are there at once, each with rows of its own."""
    if device.type != "cuda":  # Triton's interpreter
        return min(rows, 3)
    return min(rows, PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)
