"""Cross entropy of the LM head, fused with its GEMM: never holds the logits of more than one chunk of tokens.

Forward computes the logits of one chunk of tokens, their losses, and the gradients of hidden states and weight, then
the next chunk's. Backward only multiplies by the gradient of the sum. It saves those two gradients, and no logit.

`linear_cross_entropy` computes the losses in a kernel of ours, `chunked_linear_loss` in any code that autograd follows.
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
ALIGNED_ROWS = 64
"""a vocabulary is padded to a multiple of this: 128 bytes of logits in 16 bits"""


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


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each target, in plain torch; 0 where it is ignored."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(targets)


ChunkLosses = Callable[[Tensor, Tensor, bool], Tensor]
"""(logits of a chunk, its targets, whether to overwrite the logits with the gradient of the sum) to a loss per token"""


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    losses: ChunkLosses,
    *,
    chunk_tokens: int,
    backward: bool,
    bias: Tensor | None = None,
    weight_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (sum of losses, its gradients for x [tokens, d], weight [V, d] and bias [V]).

    The gradients are empty without `backward`, that of the weight without `weight_grad`, that of the bias without one.

    A vocabulary of an odd size is padded with rows of zeros: without aligned rows of logits the three GEMMs take five
    times as long. `losses` sees the logits of the vocabulary alone: those of the padding, and their gradients, are 0.
    """
    total, vocab = x.new_zeros((), dtype=_wide(x.dtype)), len(weight)
    dx = torch.empty_like(x) if backward else x.new_empty(0)
    dw, db = weight.new_empty(0), weight.new_zeros(0 if bias is None else vocab, dtype=total.dtype)
    weight, bias = pad_rows(weight), None if bias is None else pad_rows(bias)
    for start in range(0, len(x), chunk_tokens):
        hidden = x[start : start + chunk_tokens]
        logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
        total += losses(logits[:, :vocab], targets[start : start + chunk_tokens], backward).sum()
        if not backward:
            continue
        torch.mm(logits, weight, out=dx[start : start + chunk_tokens])
        # In float16 a sum over many tokens overflows, and no loss scale would help: it comes after this.
        if not weight_grad:
            pass
        elif len(x) <= chunk_tokens and x.dtype != torch.float16:
            dw = logits.t() @ hidden
        elif start == 0:
            dw = _wide_matmul(logits.t(), hidden)
        else:
            _wide_addmm_(dw, logits.t(), hidden)
        if bias is not None:
            db += logits[:, :vocab].sum(0, dtype=db.dtype)
    return total, dx, dw[:vocab], db


def pad_rows(matrix: Tensor) -> Tensor:
    """A matrix, or a vector, whose number of rows GEMMs read fast: zeros follow, if some are missing."""
    missing = -len(matrix) % ALIGNED_ROWS
    return F.pad(matrix, (*[0] * (2 * matrix.dim() - 1), missing)) if missing else matrix


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    wide = _wide(left.dtype)
    if left.is_cuda and left.dtype != wide:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _wide_addmm_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if left.is_cuda and left.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype))


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, grad_enabled: bool) -> Tensor:
        from echelon.kernels.layers.cross_entropy_triton import cross_entropy_rows

        backward = grad_enabled and any(ctx.needs_input_grad[:2])
        flat, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
        total, dx, dw, _ = chunked_cross_entropy(
            *(flat, weight, targets, cross_entropy_rows),
            chunk_tokens=tokens_per_chunk(weight.shape[0], x.element_size()),
            backward=backward,
            weight_grad=ctx.needs_input_grad[1],
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


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""(logits [tokens, V], targets [tokens]) to a loss per token, in code that autograd follows"""


def chunked_linear_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, losses: TokenLosses, *, chunk_tokens: int
) -> Tensor:
    """Sum `losses` of the logits x weight^T + bias, `chunk_tokens` at a time, in fp32 (fp64 where x is)."""
    total: Tensor = _ChunkedLinearLoss.apply(x, weight, bias, targets, losses, chunk_tokens, torch.is_grad_enabled())
    return total


class _ChunkedLinearLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        losses: TokenLosses,
        chunk_tokens: int,
        grad_enabled: bool,
    ) -> Tensor:
        backward = grad_enabled and any(ctx.needs_input_grad[:3])
        total, dx, dw, db = chunked_cross_entropy(
            *(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), _with_gradient(losses)),
            chunk_tokens=chunk_tokens,
            backward=backward,
            bias=bias,
            weight_grad=ctx.needs_input_grad[1],
        )
        ctx.save_for_backward(dx.view_as(x) if backward else dx, dw, db)
        ctx.weight = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = ctx.saved_tensors
        weight, (scale,), needed = ctx.weight, gradients, ctx.needs_input_grad

        def compute_gradient(out: Tensor | None) -> Tensor:
            return torch.mul(dw, scale, out=torch.empty_like(weight) if out is None else out)

        weight_gradient = write_gradient((weight,), compute_gradient)[0] if needed[1] else None
        bias_gradient = (db * scale).to(weight.dtype) if needed[2] else None
        return (dx * scale).to(dx.dtype), weight_gradient, bias_gradient, None, None, None, None


def _with_gradient(losses: TokenLosses) -> ChunkLosses:
    """The losses of a chunk, whose gradient overwrites its logits."""

    def run(logits: Tensor, targets: Tensor, backward: bool) -> Tensor:
        with torch.set_grad_enabled(backward):
            given = logits.detach().requires_grad_(backward)
            each = losses(given, targets)
            if backward:
                logits.copy_(torch.autograd.grad(each.sum(), given)[0])
        return each.detach()

    return run
