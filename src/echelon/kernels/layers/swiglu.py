"""silu(gate) * up: of two tensors, or of the two halves of each row of one product's output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.tensor_metadata import Note


def gated(gate: Tensor, up: Tensor, *, remake: bool = False) -> Tensor:
    """Plain. With `remake`, backward keeps gate and up, and makes the output again."""
    if not remake:
        return F.silu(gate) * up
    out: Tensor = _Gated.apply(gate, up)
    kept_gate, kept_up = gate.detach(), up.detach()
    return tensor_metadata.write(out, Note(again=lambda _gradient: F.silu(kept_gate) * kept_up))


class _Gated(Function):
    """The product that autograd would make, but for the silu(gate) that it would keep."""

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


def swiglu(both: Tensor, *, remake: bool = False) -> Tensor:
    """[..., 2 f] to [..., f]. With `remake`, backward makes the output again instead of keeping it."""
    if not dispatch.fits(both):
        gate, up = both.chunk(2, dim=-1)
        return gated(gate, up, remake=remake)
    out, largest = _SwiGLU.apply(both)
    return tensor_metadata.write(out, Note(largest=largest, again=partial(_again, both.detach()) if remake else None))


def _again(both: Tensor, gradient: Tensor | None) -> Tensor:
    from echelon.kernels.layers import swiglu_triton

    if gradient is None:
        return swiglu_triton.forward(both)[0]
    # One reading of both halves gives the output and what backward would come to.
    behind, largest, out = swiglu_triton.backward(gradient, both, output=True)
    tensor_metadata.write(gradient, Note(behind=tensor_metadata.write(behind, Note(largest=largest))))
    return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> tuple[Tensor, Tensor]:
        from echelon.kernels.layers import swiglu_triton

        ctx.save_for_backward(both)
        out, largest = swiglu_triton.forward(both)
        ctx.mark_non_differentiable(largest)
        return out, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from echelon.kernels.layers import swiglu_triton

        behind = tensor_metadata.read(gradients[0]).behind
        if behind is not None:
            return behind
        dboth, largest, _ = swiglu_triton.backward(gradients[0], *ctx.saved_tensors)
        return tensor_metadata.write(dboth, Note(largest=largest))
