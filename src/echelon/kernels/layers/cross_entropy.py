"""Cross entropy of a language head that never holds the logits of more than some rows.

Forward makes the logits of one chunk of rows, their losses, and the gradients of both factors, then the next chunk's.
Backward only multiplies by the gradient of the sum. What is kept is the gradient of the hidden rows, of the weight, and
no logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import write_gradient
from echelon.kernels.memory_limits import tokens_per_chunk

IGNORE_INDEX = -100


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of softmax(x weight^T) [..., V] (fp32, or fp64 where x is)."""
    if dispatch.use_triton(x) and weight.dtype == x.dtype and weight.is_contiguous():
        total: Tensor = _LinearCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())
        return total
    return cross_entropy_sum(F.linear(x, weight), targets)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


ChunkLosses = Callable[[Tensor, Tensor, bool], Tensor]
"""(logits of some rows, their targets, whether to put the gradient of the sum in their place) to a loss per row"""


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, losses: ChunkLosses, *, chunk_tokens: int, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of losses, its gradients with respect to x [R, d] and to the weight [V, d]); empty ones without backward."""
    total = x.new_zeros((), dtype=torch.float32)
    dx = torch.empty_like(x) if backward else x.new_empty(0)
    dw = weight.new_empty(0)
    for start in range(0, len(x), chunk_tokens):
        part = x[start : start + chunk_tokens]
        logits = part @ weight.t()
        total += losses(logits, targets[start : start + chunk_tokens], backward).sum()
        if not backward:
            continue
        torch.mm(logits, weight, out=dx[start : start + chunk_tokens])
        # In float16 a sum over many rows overflows, and no loss scale would help: it comes after this.
        if len(x) <= chunk_tokens and x.dtype != torch.float16:
            dw = logits.t() @ part
        elif start == 0:
            dw = _matmul_fp32(logits.t(), part)
        else:
            _addmm_fp32_(dw, logits.t(), part)
    return total, dx, dw


def _matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _addmm_fp32_(onto: Tensor, left: Tensor, right: Tensor) -> None:
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(onto, left, right, out_dtype=torch.float32, out=onto)
    else:
        onto.addmm_(left.float(), right.float())


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, keeps: bool) -> Tensor:
        from echelon.kernels.layers.cross_entropy_triton import cross_entropy_rows

        backward = keeps and any(ctx.needs_input_grad[:2])
        rows = tokens_per_chunk(weight.shape[0], x.element_size())
        flat = x.reshape(-1, x.shape[-1])
        total, dx, dw = chunked_cross_entropy(
            flat, weight, targets.reshape(-1).contiguous(), cross_entropy_rows, chunk_tokens=rows, backward=backward
        )
        ctx.save_for_backward(dx.view_as(x) if backward else dx, dw)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        from echelon.kernels.layers.cross_entropy_triton import scale_into

        dx, dw = ctx.saved_tensors
        weight, (scale,) = ctx.weight, gradients

        def product(place: Tensor | None) -> Tensor:
            return scale_into(dw, scale, torch.empty_like(weight) if place is None else place)

        of_weight = write_gradient((weight,), product)[0] if ctx.needs_input_grad[1] else None
        return scale_into(dx, scale, torch.empty_like(dx)), of_weight, None, None
