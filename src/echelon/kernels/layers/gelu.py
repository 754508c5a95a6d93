"""GELU in its tanh form, whose backward also sums its gradient over rows: that of the bias of the layer before it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata

MAX_ROW = 1 << 14
"""elements of a row whose column sums a program holds"""


def gelu(x: Tensor, *, recompute: bool = False) -> Tensor:
    """GELU of x, tanh form. With `recompute`, backward recomputes the output instead of saving it."""
    if not dispatch.use_triton(x) or x.shape[-1] > MAX_ROW:
        out = F.gelu(x, approximate="tanh")
        saved = x.detach()
        return tensor_metadata.attach_recompute(out, partial(F.gelu, saved, approximate="tanh")) if recompute else out
    out, amax = _GELU.apply(x)
    recompute_output = partial(_recompute_gelu, x.detach()) if recompute else None
    return tensor_metadata.attach(out, TensorMetadata(row_amax=amax, recompute=recompute_output))


def _recompute_gelu(x: Tensor, _gradient: Tensor | None) -> Tensor:
    from echelon.kernels.layers.gelu_triton import forward

    return forward(x)[0]


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        from echelon.kernels.layers.gelu_triton import forward

        ctx.save_for_backward(x)
        out, amax = forward(x)
        ctx.mark_non_differentiable(amax)
        return out, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from echelon.kernels.layers.gelu_triton import backward

        dx, sums = backward(gradients[0], *ctx.saved_tensors)
        return tensor_metadata.attach(dx, TensorMetadata(column_sums=sums))
