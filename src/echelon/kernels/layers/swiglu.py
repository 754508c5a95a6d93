"""SwiGLU, silu(gate) * up: of two tensors, or of the two halves of each row of one GEMM's output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata


def silu_mul(gate: Tensor, up: Tensor, *, recompute: bool = False) -> Tensor:
    """Compute silu(gate) * up in plain torch. With `recompute`, backward recomputes it from gate and up."""
    if not recompute:
        return F.silu(gate) * up
    out: Tensor = _SiluMul.apply(gate, up)
    saved_gate, saved_up = gate.detach(), up.detach()
    return tensor_metadata.attach_recompute(out, lambda: F.silu(saved_gate) * saved_up)


class _SiluMul(Function):
    """silu(gate) * up without saving silu(gate), which autograd would."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), gradients[0])


def swiglu(gate_up: Tensor, *, recompute: bool = False) -> Tensor:
    """SwiGLU of [..., 2 f], giving [..., f]. With `recompute`, backward recomputes the output instead of saving it."""
    if not dispatch.use_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return silu_mul(gate, up, recompute=recompute)
    out, amax = _SwiGLU.apply(gate_up)
    recompute_output = partial(_recompute_swiglu, gate_up.detach()) if recompute else None
    return tensor_metadata.attach(out, TensorMetadata(row_amax=amax, recompute=recompute_output))


def _recompute_swiglu(gate_up: Tensor, gradient: Tensor | None) -> Tensor:
    from echelon.kernels.layers import swiglu_triton

    if gradient is None:
        return swiglu_triton.forward(gate_up)[0]
    # One read of gate and up gives the output and the input gradient.
    input_gradient, amax, out = swiglu_triton.backward(gradient, gate_up, output=True)
    tensor_metadata.attach(input_gradient, TensorMetadata(row_amax=amax))
    tensor_metadata.attach(gradient, TensorMetadata(input_gradient=input_gradient))
    return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> tuple[Tensor, Tensor]:
        from echelon.kernels.layers import swiglu_triton

        ctx.save_for_backward(both)
        out, amax = swiglu_triton.forward(both)
        ctx.mark_non_differentiable(amax)
        return out, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from echelon.kernels.layers import swiglu_triton

        input_gradient = tensor_metadata.read(gradients[0]).input_gradient
        if input_gradient is not None:
            return input_gradient
        dboth, amax, _ = swiglu_triton.backward(gradients[0], *ctx.saved_tensors)
        return tensor_metadata.attach(dboth, TensorMetadata(row_amax=amax))
