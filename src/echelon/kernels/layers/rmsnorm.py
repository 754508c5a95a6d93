"""RMSNorm of a residual stream: the addition before it and the branch after it in one pass each way.

    plain                         kernel, forward                      kernel, backward
    s = x + delta                 reads x, delta; writes s, normed     reads dnormed, ds, s; writes dx
    normed = rms_norm(s) * w      (and 1/rms of each row)              (and each program's part of dw)

Of a stream that forks here, the norm's gradient and the stream's own are added inside the backward kernel.
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
    return residual_rms_norm(x, None, weight, eps, recompute=recompute)[1]


def residual_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm). With `remake`, backward makes the norm again instead of keeping it."""
    if dispatch.use_triton(x) and (delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)):
        s, normed, scale, largest = _ResidualRMSNorm.apply(x, delta, weight, eps)
        again = partial(_recompute_norm_triton, s.detach(), scale, weight.detach()) if recompute else None
        return s, tensor_metadata.attach(normed, TensorMetadata(row_amax=largest, recompute=again))
    s = x if delta is None else x + delta
    normed = F.rms_norm(s, weight.shape, weight, eps)
    if recompute:
        tensor_metadata.attach(
            normed, TensorMetadata(recompute=partial(_recompute_norm, s.detach(), weight.detach(), eps))
        )
    return s, normed


def _recompute_norm(s: Tensor, weight: Tensor, eps: float, _gradient: Tensor | None) -> Tensor:
    return F.rms_norm(s, weight.shape, weight, eps)


def _recompute_norm_triton(s: Tensor, scale: Tensor, weight: Tensor, _gradient: Tensor | None) -> Tensor:
    from echelon.kernels.layers.rmsnorm_triton import apply_scale

    return apply_scale(s, scale, weight)


class _ResidualRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from echelon.kernels.layers.rmsnorm_triton import forward

        s, normed, scale, largest = forward(x, delta, weight, eps)
        ctx.save_for_backward(s, scale, weight)
        ctx.has_delta = delta is not None
        ctx.mark_non_differentiable(scale, largest)
        ctx.set_materialize_grads(False)
        # Without a delta the stream goes through unchanged: a new view of it, so that its gradient comes by here.
        return s.view_as(s) if delta is None else s, normed, scale, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from echelon.kernels.layers.rmsnorm_triton import backward

        of_stream, of_normed = gradients[:2]
        s, scale, weight = ctx.saved_tensors
        if of_normed is None:
            return of_stream, of_stream if ctx.has_delta else None, None, None
        dx, dw, largest = backward(of_normed, of_stream, s, scale, weight)
        tensor_metadata.attach(dx, TensorMetadata(row_amax=largest))
        return dx, dx if ctx.has_delta else None, dw if ctx.needs_input_grad[2] else None, None
