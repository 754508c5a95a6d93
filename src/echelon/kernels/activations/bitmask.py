"""Bitmasks: one bit per element, for the sign of ReLU outputs and for boolean masks. Every row starts a new byte.

ReLU's backward needs only which outputs are above zero. Forward also writes these bits, and backward reads them in
place of the output: both kernels move fewer bytes than torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels import dispatch
from echelon.kernels.tensor_spec import TensorSpec, as_rows


def use_triton(x: Tensor) -> bool:
    """Return whether the Triton kernels of this package process the tensor."""
    return x.is_cuda and dispatch.triton_enabled()


def relu_with_bitmask(x: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ReLU of x, its bitmask [rows, bytes of a row], nonzeros per block). x is dense by sample.

    Only the Triton kernel counts nonzeros, for sparse_values.py; in plain torch the counts are empty.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = _ReluWithBitmask.apply(x, in_place)
    return outputs


class _ReluWithBitmask(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.spec = TensorSpec.from_tensor(x)
        if in_place:
            ctx.mark_dirty(x)
        if use_triton(x):
            from echelon.kernels.activations import bitmask_triton

            y, rows = x if in_place else torch.empty_like(x), as_rows(x)
            bits, counts = bitmask_triton.relu(rows, rows if in_place else as_rows(y))
        else:
            y = x.relu_() if in_place else torch.relu(x)
            # NaN passes, as in torch.
            bits, counts = pack_plain((as_rows(y) <= 0).logical_not_()), torch.empty(0, dtype=torch.int32)
        ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(bits, counts)
        ctx.set_materialize_grads(False)  # no zero gradients for bits and counts
        return y, bits, counts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if gradients[0] is None:
            return None, None
        double_backward = torch.is_grad_enabled()
        mask: Any = _MaskGradient.apply if double_backward else _mask_gradient
        return mask(gradients[0], ctx.saved_tensors[0], ctx.spec), None


class _MaskGradient(Function):
    """The gradient where the bits are set, else zero. It is its own derivative."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, bits: Tensor, spec: TensorSpec) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.spec = spec
        return _mask_gradient(gradient, bits, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out: Tensor = _MaskGradient.apply(gradients[0], ctx.saved_tensors[0], ctx.spec)
        return out, None, None


def _mask_gradient(gradient: Tensor, bits: Tensor, spec: TensorSpec) -> Tensor:
    gradient = spec.match_strides(gradient)
    out = torch.empty_like(gradient)
    if use_triton(gradient):
        from echelon.kernels.activations import bitmask_triton

        bitmask_triton.mask_gradient(as_rows(gradient), bits, as_rows(out))
    else:
        flat = as_rows(gradient)
        as_rows(out).copy_(torch.where(unpack_plain(bits, flat.shape[1]), flat, 0))
    return out


def pack(flags: Tensor) -> Tensor:
    """Pack bool [rows, n] into uint8 [rows, ceil(n / 8)]."""
    if use_triton(flags):
        from echelon.kernels.activations import bitmask_triton

        return bitmask_triton.pack(flags)
    return pack_plain(flags)


def unpack(bits: Tensor, out: Tensor) -> None:
    """Unpack bits into bool [rows, n]; the inverse of `pack`."""
    if use_triton(bits):
        from echelon.kernels.activations import bitmask_triton

        bitmask_triton.unpack(bits, out)
    else:
        out.copy_(unpack_plain(bits, out.shape[1]))


def pack_plain(flags: Tensor) -> Tensor:
    rows, n = flags.shape
    if n % 8:
        flags = torch.nn.functional.pad(flags, (0, -n % 8))
    eight = flags.view(torch.uint8).view(rows, -1, 8)
    out = eight[..., 0].clone()
    for place in range(1, 8):
        out |= eight[..., place] << place
    return out


def unpack_plain(bits: Tensor, n: int) -> Tensor:
    """Return bool [rows, n]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> places).bitwise_and_(1).view(torch.bool).flatten(1)[:, :n]
