"""Kernel launches: a cache of compiled Triton kernels, and grid sizes for kernels that process full rows.

Triton specialises a kernel on the dtypes of its arguments, on whether integers and addresses are multiples of 16, and
on its constants. Looking the specialisation up takes Triton longer than the launch itself, so `launch` caches it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
MAX_CACHED = 4096
"""cached launches; integers are part of the key, so a program with ever new ones clears the cache and starts afresh"""


def launch(kernel: Any, num_programs: int, *given: Tensor | int | float, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel whose parameters are `given`, in order, followed by `constants`, by name."""
    key: list[Any] = [kernel, num_warps, *constants.values()]
    arguments: list[Any] = []
    for x in given:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            key += (x.dtype, x.device, address % 16 == 0)
            arguments.append(address)  # given a tensor, Triton would ask the driver where it is
        else:
            key.append(x)
            arguments.append(x)
    compiled = _compiled.get(tuple(key))
    if compiled is not None:
        compiled[num_programs, 1, 1](*arguments, *constants.values())
        return
    if list(constants) != kernel.arg_names[len(given) :]:
        raise TypeError(
            f"constants are not in the order of the kernel's parameters (expected {kernel.arg_names[len(given) :]}, "
            f"got {list(constants)}); pass them in that order"
        )
    compiled = kernel[(num_programs,)](*given, **constants, num_warps=num_warps)
    if compiled is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= MAX_CACHED:
            _compiled.clear()
        _compiled[tuple(key)] = compiled


def row_block(width: int) -> int:
    """Return the smallest power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def warps_per_row(block: int) -> int:
    """Return the warps that give each thread 16 elements: two 16-byte loads of a 16-bit dtype."""
    return min(max(block // 512, 1), 16)


def persistent_grid(num_rows: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return (programs, warps of each) for a kernel whose programs loop over rows: as many as run at once.

    Tuned on an H200: wide rows are faster with fewer threads that hold more elements each.
    """
    narrow = (4, 8) if block <= 1024 else (8, 4)
    warps, per_sm = narrow if block <= 2048 else (4, 3) if block <= 4096 else (8, 2)
    if device.type != "cuda":  # Triton's interpreter
        return min(num_rows, 3), warps
    return min(num_rows, per_sm * torch.cuda.get_device_properties(device).multi_processor_count), warps
