"""Products with weights that lie side by side as one product, and gradients written where they are kept.

A flat unit (parallel/dp/param_group.py) holds the weights of q, k and v, or of gate and up, one after the other: seen as one
matrix they are one product, with no copy. The same holds for their gradients, which the backward product writes
straight into the unit's buffer (`receive`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from echelon.kernels import dispatch, tensor_metadata

ComputeGradient = Callable[[Tensor | None], Tensor]
"""makes a gradient: in the place it is given, or in a new tensor"""
SavedTensors = tuple[Tensor, ...]
GradBufferLike = Any
"""where parameters live: it receives gradients, and has a `version` that grows with every change; none has no home"""


class LinearGemms(Protocol):
    """How the three products of a linear layer are computed."""

    def supports(self, weight: Tensor) -> bool:
        """It can be computed so."""
        ...

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_buffer: GradBufferLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        """x weight^T + bias, and what the weight's gradient will need of x, or beside an x that will be remade."""
        ...

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        """What the weight's gradient needs of an x that was remade, with what forward kept beside it."""
        ...

    def backward(
        self, dy: Tensor, weight: Tensor, grad_buffer: GradBufferLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        """The gradient of x, and how that of the weight comes of what was kept."""
        ...


class PlainGemms:
    """In the type of the tensors."""

    def supports(self, weight: Tensor) -> bool:
        return True

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_buffer: GradBufferLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        return F.linear(x, weight, bias), () if recomputed else (x,)

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        return (x,)

    def backward(
        self, dy: Tensor, weight: Tensor, grad_buffer: GradBufferLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        def of_weight(kept: SavedTensors) -> ComputeGradient:
            (x,) = kept
            return lambda place: dy.t() @ x if place is None else torch.mm(dy.t(), x, out=place)

        return dy @ weight if needs_input else None, of_weight


PLAIN_GEMMS = PlainGemms()


def project(x: Tensor, *linears: Any) -> Tensor:
    """The outputs of linear layers that read the same input, one after the other in the last dim."""
    arithmetic = getattr(linears[0], "arithmetic", PLAIN_GEMMS)
    return fused_linear(x, [linear.weight for linear in linears], [linear.bias for linear in linears], arithmetic)


def fused_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gemms: LinearGemms = PLAIN_GEMMS
) -> Tensor:
    """x times each weight transposed, plus its bias, one after the other in the last dim."""
    if has_torch_function_unary(x):
        result: Tensor = handle_torch_function(fused_linear, (x,), x, weights, biases, gemms)
        return result
    if dispatch.use_triton(x) or (tensor_metadata.read(x).recompute is not None and not dispatch.autocast_enabled(x)):
        given = [bias for bias in biases if bias is not None]
        weight, bias = concat_view(weights), concat_view(given) if given else None
        biases_fit = not given or (bias is not None and len(given) == len(weights))
        if weight is not None and weight.dtype == x.dtype and biases_fit:
            chosen = gemms if gemms.supports(weight) else PLAIN_GEMMS
            keeps = torch.is_grad_enabled()
            out: Tensor = _FusedLinear.apply(x, weight, bias, chosen, keeps, len(weights), *weights, *given)
            return out
    found = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def concat_view(matrices: Sequence[Tensor]) -> Tensor | None:
    """The matrices [out_i, in], or vectors, as one, without a copy; none where they do not lie one after the other."""
    first, rows = matrices[0], 0
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for matrix in matrices:
        # Neighbours by chance, in memory of their own, are not one tensor.
        if matrix.untyped_storage().data_ptr() != storage or matrix.dtype != first.dtype:
            return None
        # An address of 0 is that of a parameter that was freed: its own module must be called to have it gathered.
        if not end or matrix.data_ptr() != end or not matrix.is_contiguous() or matrix.shape[1:] != first.shape[1:]:
            return None
        end += matrix.numel() * matrix.element_size()
        rows += len(matrix)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def write_gradient(parameters: Sequence[Tensor], compute_gradient: ComputeGradient) -> list[Tensor | None]:
    """Hands a gradient to the parameters' home, or where they have none returns each one's part for autograd."""
    home: Any = getattr(parameters[0], "home", None)
    if home is not None:
        home.receive(parameters, compute_gradient)
        return [None] * len(parameters)
    return list(compute_gradient(None).split([len(parameter) for parameter in parameters]))


class _FusedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arithmetic: LinearGemms,
        keeps: bool,
        num_weights: int,
        *parameters: Tensor,
    ) -> Tensor:
        known = tensor_metadata.read(x)
        flat = tensor_metadata.attach(x.reshape(-1, x.shape[-1]), known)
        ctx.weights, ctx.sizes = parameters[:num_weights], [len(each) for each in parameters[num_weights:]]
        ctx.home = getattr(ctx.weights[0], "home", None)
        y, kept = arithmetic.forward(flat, weight, bias, ctx.home, recomputed=known.recompute is not None or not keeps)
        ctx.again, ctx.recomputable = known.recompute, known.recompute is not None
        ctx.save_for_backward(*kept)
        ctx.weight, ctx.arithmetic, ctx.shape = weight, arithmetic, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        flat = tensor_metadata.attach(dy.reshape(-1, dy.shape[-1]), tensor_metadata.read(dy))
        dx, of_weight = ctx.arithmetic.backward(flat, ctx.weight, ctx.home, ctx.needs_input_grad[0])
        dx = dx.view(ctx.shape) if dx is not None else None
        found: list[Tensor | None] = [None] * len(ctx.weights)
        if any(ctx.needs_input_grad[6 : 6 + len(found)]):
            kept = ctx.saved_tensors
            if ctx.recomputable:
                if ctx.again is None:
                    raise RuntimeError(
                        "what recompute=ops makes again is let go of after one backward pass; "
                        "use recompute=none to go backward twice (retain_graph)"
                    )
                kept = ctx.arithmetic.save_recomputed(ctx.again(dx).reshape(-1, ctx.shape[-1]), kept)
            found = write_gradient(ctx.weights, of_weight(kept))
        ctx.again = None  # it holds tensors, which autograd does not know of
        of_biases = flat.sum(0).split(ctx.sizes) if ctx.sizes else ()
        return dx, None, None, None, None, None, *found, *of_biases
