"""Max-pool indices in one byte: the position inside the window, in place of torch's 8-byte index inside the image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels.activations import bitmask


@dataclass(frozen=True, kw_only=True)
class PoolWindow:
    """The windows of a 2-d pooling; pairs are (vertical, horizontal)."""

    width: int
    """of the input image"""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool = False
    """windows may extend beyond the edge"""

    @property
    def is_non_overlapping(self) -> bool:
        """Return whether windows neither overlap nor extend beyond the edge."""
        return self.stride == self.kernel and self.padding == (0, 0) and self.dilation == (1, 1) and not self.ceil_mode


def encode(indices: Tensor, window: PoolWindow) -> Tensor:
    """Convert int64 indices into an image [..., H, W] to uint8 positions inside windows, of the same shape."""
    out = torch.empty_like(indices, dtype=torch.uint8)
    if bitmask.use_triton(indices) and out.stride() == indices.stride() and has_regular_strides(indices):
        from echelon.kernels.activations import pool_indices_triton

        pool_indices_triton.encode(indices, window, out)
    else:
        down, across = _window_origins(indices, window)
        row = (indices // window.width - down) // window.dilation[0]
        column = (indices % window.width - across) // window.dilation[1]
        out.copy_(row * window.kernel[1] + column)
    return out


def decode(codes: Tensor, window: PoolWindow) -> Tensor:
    """Convert positions inside windows to indices into the image; the inverse of `encode`."""
    out = torch.empty_like(codes, dtype=torch.int64)
    if bitmask.use_triton(codes) and out.stride() == codes.stride() and has_regular_strides(codes):
        from echelon.kernels.activations import pool_indices_triton

        pool_indices_triton.decode(codes, window, out)
    else:
        down, across = _window_origins(codes, window)
        row = down + codes // window.kernel[1] * window.dilation[0]
        out.copy_(row * window.width + across + codes % window.kernel[1] * window.dilation[1])
    return out


def _window_origins(like: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
    """Return the row and column of the image where each window starts; negative in the padding."""
    down = torch.arange(like.shape[-2], device=like.device).unsqueeze(-1) * window.stride[0] - window.padding[0]
    across = torch.arange(like.shape[-1], device=like.device) * window.stride[1] - window.padding[1]
    return down, across


def has_regular_strides(x: Tensor) -> bool:
    """Return whether x is contiguous or channels-last, with element counts that fit int32: 64-bit division is slow."""
    if x.numel() >= 1 << 31:
        return False
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
