"""Dispatch between Triton kernels and plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

MIN_WIDTH, MAX_WIDTH = 16, 1 << 18
"""row widths that the kernels support"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_enabled = True


def use_triton(x: Tensor) -> bool:
    """Return whether Triton kernels process this tensor: its device, dtype and row width are supported."""
    if not x.is_cuda or x.dtype not in DTYPES or not MIN_WIDTH <= x.shape[-1] <= MAX_WIDTH:
        return False
    return x.numel() > 0 and triton_enabled() and not autocast_enabled(x)


def autocast_enabled(x: Tensor) -> bool:
    """Return whether autocast chooses dtypes on x's device, which our autograd functions would ignore."""
    return torch.is_autocast_enabled(x.device.type)


def triton_enabled() -> bool:
    """Return whether Triton is installed and `plain_torch` is not in force."""
    return _enabled and _triton_installed()


def use_triton_update(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether Triton kernels update weights on this device, with arithmetic in `dtype`."""
    return device.type == "cuda" and dtype == torch.float32 and triton_enabled()


@contextmanager
def plain_torch(enabled: bool = True) -> Iterator[None]:
    """Run plain torch everywhere inside this context, in all threads: autograd runs backward in threads of its own."""
    global _enabled
    before, _enabled = _enabled, not enabled
    try:
        yield
    finally:
        _enabled = before


@lru_cache(maxsize=1)
def _triton_installed() -> bool:
    return find_spec("triton") is not None
