"""How kernels that take whole rows are launched."""

from __future__ import annotations

import torch


def row_block(width: int) -> int:
    """The power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def warps_per_row(block: int) -> int:
    """So that a thread has 16 elements: two loads of 16 bytes in 16 bits."""
    return min(max(block // 512, 1), 16)


def persistent_grid(num_rows: int, block: int, device: torch.device) -> tuple[int, int]:
    """(programs, warps of each) where a program goes over many rows: as many as are there at once.

    Found by trying on an H200: wide rows do better with fewer threads that hold more each.
    """
    each, count = (8, 4) if block <= 2048 else (4, 3) if block <= 4096 else (8, 2)
    if device.type != "cuda":  # Triton's interpreter
        return min(num_rows, 3), each
    return min(num_rows, count * torch.cuda.get_device_properties(device).multi_processor_count), each
