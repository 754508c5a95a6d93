"""RMSNorm and LayerNorm of a residual stream, fused with the residual addition: one pass over memory each way.

    plain                         kernel, forward                      kernel, backward
    s = x + delta                 reads x, delta; writes s, normed     reads dnormed, ds, s; writes dx
    normed = rms_norm(s) * w      (and 1/rms of each row)              (and each program's part of dw)

The backward kernel adds the gradient of the residual stream to that of the norm. LayerNorm has a mean and a bias too;
its backward also sums the stream's gradient over rows, for the bias of the linear layer that made the delta.
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
    return _residual_norm(x, delta, weight, None, eps, recompute=recompute)


def residual_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float, *, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, its LayerNorm). With `recompute`, backward recomputes the norm instead of saving it."""
    return _residual_norm(x, delta, weight, bias, eps, recompute=recompute)


def _residual_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, recompute: bool
) -> tuple[Tensor, Tensor]:
    if dispatch.use_triton(x) and (delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)):
        s, normed, scale, mean, amax = _ResidualNorm.apply(x, delta, weight, bias, eps)
        given = (s.detach(), scale, mean, weight.detach(), None if bias is None else bias.detach())
        recompute_norm = partial(_recompute_norm_triton, *given) if recompute else None
        return s, tensor_metadata.attach(normed, TensorMetadata(row_amax=amax, recompute=recompute_norm))
    s = x if delta is None else x + delta
    normed = _plain_norm(s, weight, bias, eps)
    if recompute:
        saved, parameters = s.detach(), (weight.detach(), None if bias is None else bias.detach())
        tensor_metadata.attach_recompute(normed, partial(_plain_norm, saved, *parameters, eps))
    return s, normed


def _plain_norm(s: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return F.rms_norm(s, weight.shape, weight, eps)
    return F.layer_norm(s, weight.shape, weight, bias, eps)


def _recompute_norm_triton(
    s: Tensor,
    scale: Tensor,
    mean: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    _gradient: Tensor | None,
) -> Tensor:
    from echelon.kernels.layers.residual_norm_triton import recompute

    return recompute(s, scale, mean, weight, bias)


class _ResidualNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        from echelon.kernels.layers.residual_norm_triton import forward

        out = forward(x, delta, weight, bias, eps)
        ctx.save_for_backward(out.s, out.scale, out.mean, weight)
        ctx.has_delta = delta is not None
        ctx.mark_non_differentiable(*(one for one in (out.scale, out.mean, out.row_amax) if one is not None))
        ctx.set_materialize_grads(False)
        # Without a delta the stream is unchanged: return a new view of it, so that its gradient reaches backward.
        s = out.s.view_as(out.s) if delta is None else out.s
        return s, out.normed, out.scale, out.mean, out.row_amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from echelon.kernels.layers.residual_norm_triton import backward

        grad_residual, grad_normed = gradients[:2]
        s, scale, mean, weight = ctx.saved_tensors
        if grad_normed is None:
            return grad_residual, grad_residual if ctx.has_delta else None, None, None, None
        found = backward(grad_normed, grad_residual, s, scale, mean, weight)
        dx = tensor_metadata.attach(
            found.stream, TensorMetadata(row_amax=found.row_amax, column_sums=found.column_sums)
        )
        _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            dx,
            dx if ctx.has_delta else None,
            found.weight if needs_weight else None,
            found.bias if needs_bias else None,
            None,
        )
