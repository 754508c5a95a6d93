"""Whether a call runs our kernels or the plain torch beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

NARROWEST, WIDEST = 16, 1 << 18
"""widths of a row that a kernel takes"""
TYPES = (torch.bfloat16, torch.float16, torch.float32)

_allowed = True


def fits(x: Tensor) -> bool:
    """Our kernels take this tensor: on a GPU, of a type of theirs, rows of a sensible width."""
    if not x.is_cuda or x.dtype not in TYPES or not NARROWEST <= x.shape[-1] <= WIDEST:
        return False
    return x.numel() > 0 and allowed() and not autocast(x)


def autocast(x: Tensor) -> bool:
    """Torch chooses types where x is: our functions would not follow it."""
    return torch.is_autocast_enabled(x.device.type)


def allowed() -> bool:
    """There is Triton, and nobody asked for plain torch."""
    return _allowed and _installed()


def updates(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Our kernels update weights there, in arithmetic of this type."""
    return device.type == "cuda" and dtype == torch.float32 and allowed()


@contextmanager
def plain(only: bool = True) -> Iterator[None]:
    """Inside, the plain torch runs everywhere. For the whole process: backward runs in threads of its own."""
    global _allowed
    before, _allowed = _allowed, not only
    try:
        yield
    finally:
        _allowed = before


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None
