"""Backward in two halves: I, the gradient of a stage's input, and W, the gradients of its weights.

Inside `DeferWeightGrads`, the backward of every `F.linear` (which `nn.Linear` calls) computes the input gradient, and
appends the inputs of the weight gradient to a list. `compute_weight_grads` computes those matmuls. Everything without a
large matmul (norms, biases, embeddings, other operators) runs in the first half.

Recomputation, ours or the user's, happens inside backward and must repeat what the forward did: so I runs inside
`DeferWeightGrads` too, by `backward_inside_mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, fused_linear

WeightGradInputs = tuple[Tensor, Tensor, Tensor]
"""(weight, input, gradient of the output) of a linear"""


class _SplitBackwardLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        detached_weight: Tensor,
        bias: Tensor | None,
        _anchor: Tensor,
        weight_with_history: tuple[Tensor],
        deferred: list[WeightGradInputs],
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
        ctx.deferred.append((*ctx.weight_with_history, x, gradient))
        bias = _flatten_tokens(gradient).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return gradient @ detached_weight if ctx.needs_input_grad[0] else None, None, bias, None, None, None


class DeferWeightGrads(TorchFunctionMode):
    """Linears called inside append their weight gradients to `deferred` instead of computing them."""

    def __init__(self, deferred: list[WeightGradInputs]):
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        if func is fused_linear and torch.is_grad_enabled():
            x, weights, biases, arithmetic = args
            if arithmetic is not PLAIN_GEMMS:
                raise ValueError(
                    "split backward does not support fp8 matmuls (precision.compute); use schedule=1f1b or interleaved"
                )
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
    deferred: list[WeightGradInputs],
    accumulate: Callable[[Tensor, Tensor, Tensor], None],
    unshard: Callable[[], None] = lambda: None,
) -> None:
    """Run W: `accumulate` gets each parameter and the two matrices whose matmul is its gradient.

    A weight that was computed has a history, which reads parameters: `unshard` is called before it.
    """
    while deferred:
        weight, x, gradient = deferred.pop(0)
        left, right = _flatten_tokens(gradient).t(), _flatten_tokens(x)
        if weight.is_leaf:
            accumulate(weight, left, right)
        else:
            unshard()
            with DeferWeightGrads(deferred):
                backward_inside_mode([weight], [left @ right])


def backward_inside_mode(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` inside the current mode, also in autograd's threads.

    Given tensors, torch dispatches the call to the mode and runs it outside of it; given graph edges it does not.
    """
    torch.autograd.backward([get_gradient_edge(tensor) for tensor in outputs], list(gradients))


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
