"""Max pooling that saves one byte per maximum: its position in the window, in place of torch's 8-byte index.

Windows that do not overlap are pooled by kernels that write and read the byte. Overlapping ones use torch, and `encode`
converts its index inside the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels.activations import bitmask
from echelon.kernels.tensor_spec import TensorSpec


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
        from echelon.kernels.activations import max_pool_triton

        max_pool_triton.encode(indices, window, out)
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
        from echelon.kernels.activations import max_pool_triton

        max_pool_triton.decode(codes, window, out)
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


def supports(x: Tensor, window: PoolWindow) -> bool:
    """Return whether the Triton kernels pool this tensor."""
    return window.is_non_overlapping and x.dim() == 4 and bitmask.use_triton(x) and has_regular_strides(x)


def max_pool(x: Tensor, window: PoolWindow) -> Tensor:
    out: Tensor = _MaxPool.apply(x, window)
    return out


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: PoolWindow) -> Tensor:
        from echelon.kernels.activations import max_pool_triton

        rows, channels, down, across = x.shape
        size = (rows, channels, down // window.kernel[0], across // window.kernel[1])
        memory_format = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)
        codes = torch.empty_like(out, dtype=torch.uint8)
        max_pool_triton.max_pool(x, window, out, codes)
        ctx.save_for_backward(codes)
        ctx.window, ctx.input, ctx.output = window, TensorSpec.from_tensor(x), TensorSpec.from_tensor(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        double_backward = torch.is_grad_enabled()
        scatter: Any = _MaxPoolGradient.apply if double_backward else _scatter_gradient
        return scatter(ctx.output.match_strides(gradients[0]), ctx.saved_tensors[0], ctx.window, ctx.input), None


class _MaxPoolGradient(Function):
    """The gradient at each maximum, else zero."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, codes: Tensor, window: PoolWindow, spec: TensorSpec) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.window = window
        return _scatter_gradient(gradient, codes, window, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        indices = decode(ctx.saved_tensors[0], ctx.window)
        picked = gradients[0].flatten(2).gather(2, indices.flatten(2))
        return picked.view(indices.shape), None, None, None


def _scatter_gradient(gradient: Tensor, codes: Tensor, window: PoolWindow, spec: TensorSpec) -> Tensor:
    from echelon.kernels.activations import max_pool_triton

    out = spec.empty()
    if out.shape[2] % window.kernel[0] or out.shape[3] % window.kernel[1]:
        out.zero_()  # elements outside all windows
    max_pool_triton.scatter_gradient(gradient, codes, window, out)
    return out
