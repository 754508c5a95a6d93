"""Whether a call runs our kernels or the plain torch beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

MIN_WIDTH, MAX_WIDTH = 16, 1 << 18
"""widths of a row that a kernel takes"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_enabled = True


def use_triton(x: Tensor) -> bool:
    """Our kernels take this tensor: on a GPU, of a type of theirs, rows of a sensible width."""
    if not x.is_cuda or x.dtype not in DTYPES or not MIN_WIDTH <= x.shape[-1] <= MAX_WIDTH:
        return False
    return x.numel() > 0 and triton_enabled() and not autocast_enabled(x)


def autocast_enabled(x: Tensor) -> bool:
    """Torch chooses types where x is: our functions would not follow it."""
    return torch.is_autocast_enabled(x.device.type)


def triton_enabled() -> bool:
    """There is Triton, and nobody asked for plain torch."""
    return _enabled and _triton_installed()


def use_triton_update(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Our kernels update weights there, in arithmetic of this type."""
    return device.type == "cuda" and dtype == torch.float32 and triton_enabled()


@contextmanager
def plain_torch(enabled: bool = True) -> Iterator[None]:
    """Inside, the plain torch runs everywhere. For the whole process: backward runs in threads of its own."""
    global _enabled
    before, _enabled = _enabled, not enabled
    try:
        yield
    finally:
        _enabled = before


@lru_cache(maxsize=1)
def _triton_installed() -> bool:
    return find_spec("triton") is not None
