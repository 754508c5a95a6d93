"""Max pooling over windows that lie side by side, which keeps one byte for each maximum: its place in the window.

Torch's own writes an index of 8 bytes in forward and reads it in backward. Where windows overlap, it still does, and
places.py makes a byte of the index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels.activations import bitmask
from echelon.kernels.activations.pool_indices import Window, decode, regular
from echelon.kernels.tensor_spec import Lying


def takes(x: Tensor, window: Window) -> bool:
    """Our kernels pool the tensor."""
    return window.side_by_side and x.dim() == 4 and bitmask.ours(x) and regular(x)


def maximum(x: Tensor, window: Window) -> Tensor:
    out: Tensor = _Maximum.apply(x, window)
    return out


class _Maximum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        from echelon.kernels.activations import max_pool_triton

        rows, channels, down, across = x.shape
        size = (rows, channels, down // window.kernel[0], across // window.kernel[1])
        lying = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        out, codes = (torch.empty(size, dtype=t, device=x.device, memory_format=lying) for t in (x.dtype, torch.uint8))
        max_pool_triton.maximum(x, window, out, codes)
        ctx.save_for_backward(codes)
        ctx.window, ctx.input, ctx.output = window, Lying.of(x), Lying.of(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread: Any = _Spread.apply if torch.is_grad_enabled() else _spread  # it may be a backward of a backward
        return spread(ctx.output.like(gradients[0]), ctx.saved_tensors[0], ctx.window, ctx.input), None


class _Spread(Function):
    """The gradient at the place of each maximum, else zero."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, codes: Tensor, window: Window, lying: Lying) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.window = window
        return _spread(gradient, codes, window, lying)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        indices = decode(ctx.saved_tensors[0], ctx.window)
        picked = gradients[0].flatten(2).gather(2, indices.flatten(2))
        return picked.view(indices.shape), None, None, None


def _spread(gradient: Tensor, codes: Tensor, window: Window, lying: Lying) -> Tensor:
    from echelon.kernels.activations import max_pool_triton

    out = lying.empty()
    if out.shape[2] % window.kernel[0] or out.shape[3] % window.kernel[1]:
        out.zero_()  # what lies in no window
    max_pool_triton.spread(gradient, codes, window, out)
    return out
