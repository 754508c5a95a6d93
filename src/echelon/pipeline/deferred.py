"""Backward in two halves: the gradient of a stage's input now, those of its weights later.

Inside `Deferred`, every `F.linear` (which `nn.Linear` calls) gives its input's gradient in backward as always, and puts
what its weight's gradient needs on a list. `run` computes those products. What has no large product (norms, biases,
embeddings) is done in the first half, and so is everything of a layer that is not linear: later is only faster.

A repeated forward (recomputation) happens inside the first half, so it runs inside `Deferred` too (`Stream.around`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Product = tuple[Tensor, Tensor, Tensor]
"""a weight, the input it was applied to, the gradient of the output"""


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: list[Product]) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation hands back what was saved without its history, and the gradient must reach the weight itself.
        ctx.weight, ctx.later, ctx.has_bias = weight, later, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.weight, x, gradient))
        bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, bias, None


class Deferred(TorchFunctionMode):
    """Linears called inside put their weights' gradients off, onto `later`."""

    def __init__(self, later: list[Product]):
        super().__init__()
        self.later = later

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.requires_grad:
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, weight, bias, self.later)
        return out


def run(later: list[Product]) -> None:
    """The second half: every product that was put off, delivered to its weight as backward would."""
    while later:
        weight, x, gradient = later.pop(0)
        torch.autograd.backward([weight], [gradient.flatten(0, -2).t() @ x.flatten(0, -2)])
