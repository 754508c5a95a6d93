"""Cross entropy of the LM head, fused with its GEMM: never holds the logits of more than one chunk of tokens.

Forward computes the logits of one chunk of tokens, their losses, and the gradients of hidden states and weight, then
the next chunk's. Backward only multiplies by the gradient of the sum. It saves those two gradients, and no logit.
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
    """Sum the cross entropies of softmax(x weight^T) [..., V], in fp32 (fp64 where x is)."""
    if dispatch.use_triton(x) and weight.dtype == x.dtype and weight.is_contiguous():
        total: Tensor = _LinearCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())
        return total
    return cross_entropy_sum(F.linear(x, weight), targets)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross entropies of logits [..., V] in plain torch."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


ChunkLosses = Callable[[Tensor, Tensor, bool], Tensor]
"""(logits of a chunk, its targets, whether to overwrite the logits with the gradient of the sum) to a loss per token"""


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, losses: ChunkLosses, *, chunk_tokens: int, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum of losses, its gradients for x [tokens, d] and weight [V, d]); these are empty without `backward`."""
    total = x.new_zeros((), dtype=torch.float32)
    dx = torch.empty_like(x) if backward else x.new_empty(0)
    dw = weight.new_empty(0)
    for start in range(0, len(x), chunk_tokens):
        hidden = x[start : start + chunk_tokens]
        logits = hidden @ weight.t()
        total += losses(logits, targets[start : start + chunk_tokens], backward).sum()
        if not backward:
            continue
        torch.mm(logits, weight, out=dx[start : start + chunk_tokens])
        # In float16 a sum over many tokens overflows, and no loss scale would help: it comes after this.
        if len(x) <= chunk_tokens and x.dtype != torch.float16:
            dw = logits.t() @ hidden
        elif start == 0:
            dw = _matmul_fp32(logits.t(), hidden)
        else:
            _addmm_fp32_(dw, logits.t(), hidden)
    return total, dx, dw


def _matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _addmm_fp32_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(left.float(), right.float())


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, grad_enabled: bool) -> Tensor:
        from echelon.kernels.layers.cross_entropy_triton import cross_entropy_rows

        backward = grad_enabled and any(ctx.needs_input_grad[:2])
        flat, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
        total, dx, dw = chunked_cross_entropy(
            *(flat, weight, targets, cross_entropy_rows),
            chunk_tokens=tokens_per_chunk(weight.shape[0], x.element_size()),
            backward=backward,
        )
        ctx.save_for_backward(dx.view_as(x) if backward else dx, dw)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        from echelon.kernels.layers.cross_entropy_triton import scale_into

        dx, dw = ctx.saved_tensors
        weight, (loss_gradient,) = ctx.weight, gradients

        def compute_gradient(out: Tensor | None) -> Tensor:
            return scale_into(dw, loss_gradient, torch.empty_like(weight) if out is None else out)

        weight_gradient = write_gradient((weight,), compute_gradient)[0] if ctx.needs_input_grad[1] else None
        return scale_into(dx, loss_gradient, torch.empty_like(dx)), weight_gradient, None, None
