"""RMSNorm of a residual stream, fused with the residual addition: one pass over memory in each direction.

    plain                         kernel, forward                      kernel, backward
    s = x + delta                 reads x, delta; writes s, normed     reads dnormed, ds, s; writes dx
    normed = rms_norm(s) * w      (and 1/rms of each row)              (and each program's part of dw)

The backward kernel adds the gradient of the residual stream to that of the norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, recompute: bool = False) -> Tensor:
    """RMSNorm of x. With `recompute`, backward recomputes the output instead of saving it."""
    return residual_rms_norm(x, None, weight, eps, recompute=recompute)[1]


def residual_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, its norm). With `recompute`, backward recomputes the norm instead of saving it."""
    if dispatch.use_triton(x) and (delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)):
        s, normed, scale, amax = _ResidualRMSNorm.apply(x, delta, weight, eps)
        recompute_norm = partial(_recompute_norm_triton, s.detach(), scale, weight.detach()) if recompute else None
        return s, tensor_metadata.attach(normed, TensorMetadata(row_amax=amax, recompute=recompute_norm))
    s = x if delta is None else x + delta
    normed = F.rms_norm(s, weight.shape, weight, eps)
    if recompute:
        tensor_metadata.attach_recompute(normed, partial(F.rms_norm, s.detach(), weight.shape, weight.detach(), eps))
    return s, normed


def _recompute_norm_triton(s: Tensor, scale: Tensor, weight: Tensor, _gradient: Tensor | None) -> Tensor:
    from echelon.kernels.layers.rmsnorm_triton import apply_scale

    return apply_scale(s, scale, weight)


class _ResidualRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from echelon.kernels.layers.rmsnorm_triton import forward

        s, normed, scale, amax = forward(x, delta, weight, eps)
        ctx.save_for_backward(s, scale, weight)
        ctx.has_delta = delta is not None
        ctx.mark_non_differentiable(scale, amax)
        ctx.set_materialize_grads(False)
        # Without a delta the stream is unchanged: return a new view of it, so that its gradient reaches backward.
        return s.view_as(s) if delta is None else s, normed, scale, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from echelon.kernels.layers.rmsnorm_triton import backward

        grad_residual, grad_normed = gradients[:2]
        s, scale, weight = ctx.saved_tensors
        if grad_normed is None:
            return grad_residual, grad_residual if ctx.has_delta else None, None, None
        dx, dw, amax = backward(grad_normed, grad_residual, s, scale, weight)
        tensor_metadata.attach(dx, TensorMetadata(row_amax=amax))
        return dx, dx if ctx.has_delta else None, dw if ctx.needs_input_grad[2] else None, None
