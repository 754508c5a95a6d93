"""Linear layers that read one input as one GEMM, with weight gradients written straight into their gradient buffers.

A parameter group (parallel/dp/param_group.py) stores the weights of q, k and v, or of gate and up, consecutively:
viewed as one matrix they are one GEMM, without a copy. The same holds for their gradients, which the backward GEMM
writes into the group's gradient buffer (`write_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from echelon.kernels import dispatch, tensor_metadata

ComputeGradient = Callable[[Tensor | None], Tensor]
"""computes a gradient into the given tensor, or into a new one"""
SavedTensors = tuple[Tensor, ...]
GradHookLike = Any
"""a parameter's `grad_hook`: receives gradients, and its `version` grows with every weight update;
None where a parameter has none"""


class LinearGemms(Protocol):
    """The three GEMMs of a linear layer: forward, input gradient, weight gradient."""

    def supports(self, weight: Tensor) -> bool:
        """Return whether these GEMMs can multiply by this weight."""
        ...

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_hook: GradHookLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        """Return x weight^T + bias, and what the weight gradient needs of x (beside x itself, if x is `recomputed`)."""
        ...

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        """Return what the weight gradient needs of a recomputed x, given what forward saved beside it."""
        ...

    def backward(
        self, dy: Tensor, weight: Tensor, grad_hook: GradHookLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        """Return the gradient of x, and a function from the saved tensors to the weight gradient."""
        ...


class PlainGemms:
    """GEMMs in the dtype of the tensors."""

    def supports(self, weight: Tensor) -> bool:
        return True

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_hook: GradHookLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        return F.linear(x, weight, bias), () if recomputed else (x,)

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        return (x,)

    def backward(
        self, dy: Tensor, weight: Tensor, grad_hook: GradHookLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        def weight_gradient(saved: SavedTensors) -> ComputeGradient:
            (x,) = saved
            return lambda out: dy.t() @ x if out is None else torch.mm(dy.t(), x, out=out)

        return dy @ weight if needs_input else None, weight_gradient


PLAIN_GEMMS = PlainGemms()


def project(x: Tensor, *linears: Any) -> Tensor:
    """Return the outputs of linear layers that read the same input, concatenated in the last dim."""
    gemms = getattr(linears[0], "gemms", PLAIN_GEMMS)
    return fused_linear(x, [linear.weight for linear in linears], [linear.bias for linear in linears], gemms)


def fused_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gemms: LinearGemms = PLAIN_GEMMS
) -> Tensor:
    """Return x weight^T + bias of each weight, concatenated in the last dim; one GEMM where weights are consecutive."""
    if has_torch_function_unary(x):
        result: Tensor = handle_torch_function(fused_linear, (x,), x, weights, biases, gemms)
        return result
    operands = gemm_operands(x, weights, biases, gemms)
    if operands is not None:
        given, grad_enabled = [bias for bias in biases if bias is not None], torch.is_grad_enabled()
        gemm = (operands.weight, operands.bias, operands.gemms)
        out: Tensor = _FusedLinear.apply(x, *gemm, grad_enabled, len(weights), *weights, *given)
        return out
    outputs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True)
class GemmOperands:
    """Linear layers that read one input, as one GEMM."""

    weight: Tensor
    """all weights, one below the other, without a copy"""
    bias: Tensor | None
    gemms: LinearGemms


def gemm_operands(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gemms: LinearGemms
) -> GemmOperands | None:
    """Return the one GEMM that computes linear layers; None where torch computes each of them."""
    recomputable = tensor_metadata.read(x).recompute is not None
    if not dispatch.use_triton(x) and (not recomputable or dispatch.autocast_enabled(x)):
        return None
    given = [bias for bias in biases if bias is not None]
    weight, bias = concat_view(weights), concat_view(given) if given else None
    biases_fit = not given or (bias is not None and len(given) == len(weights))
    if weight is None or weight.dtype != x.dtype or not biases_fit:
        return None
    return GemmOperands(weight, bias, gemms if gemms.supports(weight) else PLAIN_GEMMS)


def concat_view(matrices: Sequence[Tensor]) -> Tensor | None:
    """View matrices [out_i, in], or vectors, as one, without a copy; None where they are not consecutive in memory."""
    first, rows = matrices[0], 0
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for matrix in matrices:
        # Different storages may happen to be neighbours in memory.
        if matrix.untyped_storage().data_ptr() != storage or matrix.dtype != first.dtype:
            return None
        # Address 0 is a resharded parameter: calling its module unshards it.
        if not end or matrix.data_ptr() != end or not matrix.is_contiguous() or matrix.shape[1:] != first.shape[1:]:
            return None
        end += matrix.numel() * matrix.element_size()
        rows += len(matrix)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def write_gradient(parameters: Sequence[Tensor], compute_gradient: ComputeGradient) -> list[Tensor | None]:
    """Write a gradient into the parameters' gradient buffer; without one, return each parameter's part to autograd."""
    grad_hook: GradHookLike = getattr(parameters[0], "grad_hook", None)
    if grad_hook is not None:
        grad_hook.receive(parameters, compute_gradient)
        return [None] * len(parameters)
    return list(compute_gradient(None).split([len(parameter) for parameter in parameters]))


class _FusedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemms: LinearGemms,
        grad_enabled: bool,
        num_weights: int,
        *parameters: Tensor,
    ) -> Tensor:
        metadata = tensor_metadata.read(x)
        flat = tensor_metadata.attach(x.reshape(-1, x.shape[-1]), metadata)
        ctx.weights, ctx.bias_sizes = parameters[:num_weights], [len(bias) for bias in parameters[num_weights:]]
        ctx.grad_hook = getattr(ctx.weights[0], "grad_hook", None)
        ctx.recompute, ctx.recomputable = metadata.recompute, metadata.recompute is not None
        y, saved = gemms.forward(flat, weight, bias, ctx.grad_hook, recomputed=ctx.recomputable or not grad_enabled)
        ctx.save_for_backward(*saved)
        ctx.weight, ctx.gemms, ctx.shape = weight, gemms, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        known = tensor_metadata.read(dy)
        flat = tensor_metadata.attach(dy.reshape(-1, dy.shape[-1]), known)
        dx, weight_gradient = ctx.gemms.backward(flat, ctx.weight, ctx.grad_hook, ctx.needs_input_grad[0])
        dx = dx.view(ctx.shape) if dx is not None else None
        weight_gradients: list[Tensor | None] = [None] * len(ctx.weights)
        if any(ctx.needs_input_grad[6 : 6 + len(weight_gradients)]):
            saved = ctx.saved_tensors
            if ctx.recomputable:
                if ctx.recompute is None:
                    raise RuntimeError(
                        "recompute=ops supports one backward pass per forward pass, as it frees what it recomputes "
                        "from; use recompute=none for retain_graph"
                    )
                saved = ctx.gemms.save_recomputed(ctx.recompute(dx).reshape(-1, ctx.shape[-1]), saved)
            weight_gradients = write_gradient(ctx.weights, weight_gradient(saved))
        ctx.recompute = None  # it holds tensors that autograd does not know of
        bias_gradients: tuple[Tensor, ...] = ()
        if ctx.bias_sizes:
            sums = flat.sum(0) if known.column_sums is None else known.column_sums
            bias_gradients = sums.split(ctx.bias_sizes)
        return dx, None, None, None, None, None, *weight_gradients, *bias_gradients
