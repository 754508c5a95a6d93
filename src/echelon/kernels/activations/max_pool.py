"""Max pooling over non-overlapping windows that saves one byte per maximum: its position in the window.

Torch writes an 8-byte index in forward and reads it in backward. Overlapping windows still use torch, and
pool_indices.py converts the index to a byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels.activations import bitmask
from echelon.kernels.activations.pool_indices import PoolWindow, decode, has_regular_strides
from echelon.kernels.tensor_spec import TensorSpec


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
        out, codes = (
            torch.empty(size, dtype=t, device=x.device, memory_format=memory_format) for t in (x.dtype, torch.uint8)
        )
        max_pool_triton.max_pool(x, window, out, codes)
        ctx.save_for_backward(codes)
        ctx.window, ctx.input, ctx.output = window, TensorSpec.from_tensor(x), TensorSpec.from_tensor(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        scatter: Any = (
            _MaxPoolGradient.apply if torch.is_grad_enabled() else _scatter_gradient
        )  # grad mode: double backward
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
