"""Backward in two halves: the gradient of a stage's input now, those of its weights later.

Inside `Deferred`, every `F.linear` (which `nn.Linear` calls) gives its input's gradient in backward as always, and puts
what its weight's gradient needs on a list. `run` computes those products. What has no large product (norms, biases,
embeddings) is done in the first half, and so is everything of a layer that is not linear: later is only faster.

A repeated forward (recomputation, ours or the user's own) happens inside backward, and must do what the first one did:
so the first half runs inside `Deferred` too, with `backward` from here.
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
"""a weight, the input it was applied to, the gradient of the output"""


class _SplitBackwardLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        _anchor: Tensor,
        whole: tuple[Tensor],
        later: list[WeightGradInputs],
    ) -> Tensor:
        # The weight comes without its history and, in a tuple, with it. The first half must not walk that history: what
        # made the weight (weight normalisation, say) would have let go of its own inputs before the second half comes.
        ctx.save_for_backward(x, values)
        ctx.whole, ctx.deferred, ctx.has_bias = whole, later, bias is not None
        return F.linear(x, values, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        (gradient,) = gradients
        x, values = ctx.saved_tensors
        ctx.deferred.append((*ctx.whole, x, gradient))
        bias = _flatten_tokens(gradient).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return gradient @ values if ctx.needs_input_grad[0] else None, None, bias, None, None, None


class DeferWeightGrads(TorchFunctionMode):
    """Linears called inside put their weights' gradients off, onto `later`."""

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
                    "weights' gradients cannot be put off where products are in 8 bits (precision.compute); "
                    "use schedule=1f1b or interleaved"
                )
            parts = [self._linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.requires_grad:
            return F.linear(input, weight, bias)
        anchor = weight.new_empty(0).requires_grad_()  # backward must come by, also where nothing else asks for it
        out: Tensor = _SplitBackwardLinear.apply(input, weight.detach(), bias, anchor, (weight,), self.deferred)
        return out


def compute_weight_grads(
    deferred: list[WeightGradInputs],
    accumulate: Callable[[Tensor, Tensor, Tensor], None],
    unshard: Callable[[], None] = lambda: None,
) -> None:
    """The second half: every product that was put off. `deliver` is given a parameter and the two matrices whose
    product is its gradient.

    A weight that was computed has a history, which reads parameters and may be recomputed: `ready` is called before.
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
    """`torch.autograd.backward`, inside the mode that is in force, also in the threads that it runs in.

    Given tensors, torch hands the call itself to the mode, outside of which it then runs. Given places in the graph it
    does not.
    """
    torch.autograd.backward([get_gradient_edge(tensor) for tensor in outputs], list(gradients))


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
