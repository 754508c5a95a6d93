"""Backward in two halves: I, the gradient of a stage's input, and W, the gradients of its weights.

Inside `DeferWeightGrads`, the backward of every `F.linear` (which `nn.Linear` calls) computes the input gradient, and
appends the inputs of the weight gradient to a list. `compute_weight_grads` computes those matmuls. Everything without a
large matmul (norms, biases, embeddings, other operators) runs in the first half. Of an FP8 linear, I casts the gradient
of the output once, for both GEMMs, and W multiplies the FP8 copies.

Recomputation, ours or the user's, happens inside backward and must repeat what the forward did: so I runs inside
`DeferWeightGrads` too, by `backward_inside_mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.kernels import tensor_metadata
from echelon.kernels.gemm.fused_linear import (
    PLAIN_GEMMS,
    ComputeGradient,
    GemmOperands,
    fused_linear,
    gemm_operands,
)


@dataclass(frozen=True)
class DeferredMatmul:
    """A weight gradient: the matmul of the output's gradient and the input."""

    weight: Tensor
    x: Tensor
    gradient: Tensor
    """of the output"""


@dataclass(frozen=True)
class DeferredGemm:
    """The gradient of weights that are adjacent in memory, one below the other, by a GEMM of its own (FP8)."""

    weights: Sequence[Tensor]
    compute: ComputeGradient


DeferredGrad = DeferredMatmul | DeferredGemm


class _SplitBackwardLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        detached_weight: Tensor,
        bias: Tensor | None,
        _anchor: Tensor,
        weight_with_history: tuple[Tensor],
        deferred: list[DeferredGrad],
    ) -> Tensor:
        # The weight comes detached and, in a tuple, with its history. I must not walk that history: what computed the
        # weight (weight normalization, say) would free its own inputs before W runs.
        ctx.save_for_backward(x, detached_weight)
        ctx.weight_with_history, ctx.deferred, ctx.has_bias = weight_with_history, deferred, bias is not None
        return F.linear(x, detached_weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        x, detached_weight = ctx.saved_tensors
        (weight,) = ctx.weight_with_history
        ctx.deferred.append(DeferredMatmul(weight, x, gradient))
        bias = _flatten_tokens(gradient).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return gradient @ detached_weight if ctx.needs_input_grad[0] else None, None, bias, None, None, None


class _SplitBackwardGemms(Function):
    """A linear by other GEMMs than torch's (kernels/gemm/fused_linear.py)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        operands: GemmOperands,
        _anchor: Tensor,
        weights_with_history: Sequence[Tensor],
        deferred: list[DeferredGrad],
        *biases: Tensor,
    ) -> Tensor:
        flat = tensor_metadata.attach(x.reshape(-1, x.shape[-1]), tensor_metadata.read(x))
        ctx.grad_hook = getattr(weights_with_history[0], "grad_hook", None)
        ctx.operands, ctx.weights_with_history, ctx.deferred = operands, weights_with_history, deferred
        ctx.shape, ctx.bias_sizes = x.shape, [len(bias) for bias in biases]
        y, saved = operands.gemms.forward(flat, operands.weight, operands.bias, ctx.grad_hook, recomputed=False)
        ctx.save_for_backward(*saved)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        flat = tensor_metadata.attach(_flatten_tokens(dy), tensor_metadata.read(dy))
        gemms, weight = ctx.operands.gemms, ctx.operands.weight
        dx, weight_gradient = gemms.backward(flat, weight, ctx.grad_hook, ctx.needs_input_grad[0])
        ctx.deferred.append(DeferredGemm(ctx.weights_with_history, weight_gradient(ctx.saved_tensors)))
        bias_gradients = flat.sum(0).split(ctx.bias_sizes) if ctx.bias_sizes else ()
        return dx.view(ctx.shape) if dx is not None else None, None, None, None, None, *bias_gradients


class DeferWeightGrads(TorchFunctionMode):
    """Linears called inside append their weight gradients to `deferred` instead of computing them."""

    def __init__(self, deferred: list[DeferredGrad]):
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_exporting():  # inputs of a new size: a trace has operators alone
            return func(*args, **(kwargs or {}))
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        if func is fused_linear and torch.is_grad_enabled():
            x, weights, biases, gemms = args
            operands = gemm_operands(x, weights, biases, gemms) if gemms is not PLAIN_GEMMS else None
            if operands is not None and operands.gemms is not PLAIN_GEMMS:
                if not any(weight.requires_grad for weight in weights):
                    return fused_linear(*args)
                given = [bias for bias in biases if bias is not None]
                anchor = weights[0].new_empty(0).requires_grad_()
                return _SplitBackwardGemms.apply(x, operands, anchor, tuple(weights), self.deferred, *given)
            parts = [self._linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.requires_grad:
            return F.linear(input, weight, bias)
        anchor = weight.new_empty(0).requires_grad_()  # so that backward runs even if no other input needs a gradient
        out: Tensor = _SplitBackwardLinear.apply(input, weight.detach(), bias, anchor, (weight,), self.deferred)
        return out


def compute_weight_grads(
    deferred: list[DeferredGrad],
    accumulate: Callable[[Tensor, Tensor, Tensor], None],
    accumulate_gemm: Callable[[Sequence[Tensor], ComputeGradient], None],
    unshard: Callable[[], None] = lambda: None,
) -> None:
    """Run W: `accumulate` gets each parameter and the two matrices whose matmul is its gradient.

    `accumulate_gemm` gets adjacent parameters and their GEMM. A weight that was computed has a history, which reads
    parameters: `unshard` is called before it.
    """
    while deferred:
        grad = deferred.pop(0)
        if isinstance(grad, DeferredGemm):
            weights, parts = list(grad.weights), [len(weight) for weight in grad.weights]
            if all(weight.is_leaf for weight in weights):
                accumulate_gemm(weights, grad.compute)
                continue
            gradients = list(grad.compute(None).split(parts))
        else:
            weights, left, right = [grad.weight], _flatten_tokens(grad.gradient).t(), _flatten_tokens(grad.x)
            if grad.weight.is_leaf:
                accumulate(grad.weight, left, right)
                continue
            gradients = [left @ right]
        unshard()
        with DeferWeightGrads(deferred):
            backward_inside_mode(weights, gradients)


def backward_inside_mode(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` inside the current mode, also in autograd's threads.

    Given tensors, torch dispatches the call to the mode and runs it outside of it; given graph edges it does not.
    """
    torch.autograd.backward([get_gradient_edge(tensor) for tensor in outputs], list(gradients))


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
