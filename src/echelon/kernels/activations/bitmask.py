"""One bit for each element: where a ReLU lets through, and flags. A row of elements begins a byte of its own.

ReLU's backward needs to know of its output only what is above zero. Forward writes these bits on the way, and backward
reads them in place of the output: with our kernels both move fewer bytes than torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from echelon.kernels import dispatch
from echelon.kernels.tensor_spec import TensorSpec, as_rows


def use_triton(x: Tensor) -> bool:
    """Our kernels of this room take the tensor."""
    return x.is_cuda and dispatch.triton_enabled()


def relu_with_bitmask(x: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(ReLU of x, its bits [rows, bytes of a row], how many are above zero in each block). x lies in rows.

    The numbers are made by our kernel only, for what follows it (sparse.py); beside plain torch there are none.
    """
    found: tuple[Tensor, Tensor, Tensor] = _ReluWithBitmask.apply(x, in_place)
    return found


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
            # What is not a number is let through, as torch does.
            bits, counts = pack_plain((as_rows(y) <= 0).logical_not_()), torch.empty(0, dtype=torch.int32)
        ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(bits, counts)
        ctx.set_materialize_grads(False)  # zeros for bits and numbers, which nobody reads
        return y, bits, counts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        if gradients[0] is None:
            return None, None
        masked: Any = (
            _MaskGradient.apply if torch.is_grad_enabled() else _mask_gradient
        )  # it may be a backward of a backward
        return masked(gradients[0], ctx.saved_tensors[0], ctx.spec), None


class _MaskGradient(Function):
    """The gradient where the bits are set, else zero. It is its own backward."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, bits: Tensor, lying: TensorSpec) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.spec = lying
        return _mask_gradient(gradient, bits, lying)

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
    """bool [rows, n] to uint8 [rows, n / 8 rounded up]"""
    if use_triton(flags):
        from echelon.kernels.activations import bitmask_triton

        return bitmask_triton.pack(flags)
    return pack_plain(flags)


def unpack(bits: Tensor, out: Tensor) -> None:
    """The inverse of `pack`, into bool [rows, n]."""
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
    """bool [rows, n]"""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> places).bitwise_and_(1).view(torch.bool).flatten(1)[:, :n]
