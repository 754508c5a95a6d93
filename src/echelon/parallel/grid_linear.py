"""A linear layer on a grid: its input, its weight and its output are all divided in two dimensions.

How the blocks meet is a `Product` (summa.py, cube.py). It has no say in what is kept: that is this rank's own blocks of
the input and of the weight, or nothing of an input that its maker makes again (recompute=ops).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import note
from echelon.parallel import grid_cost


class Product(Protocol):
    """x W^T of matrices in blocks, of which each rank holds one: x [tokens, inputs], W as it is stored."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the weight."""
        ...


class GridLinear(nn.Module):
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        product: Product,
        real_inputs: int,
        cost: grid_cost.Product,
    ):
        super().__init__()
        self.weight, self.product, self.real_inputs, self.cost = weight, product, real_inputs, cost
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = multiply(x, self.weight, self.product, self.real_inputs)
        return y if self.bias is None else y + self.bias


def multiply(x: Tensor, weight: Tensor, product: Product, real_inputs: int) -> Tensor:
    """[..., inputs] to [..., outputs]. Of the block's inputs so many are real; the weight of the others stays zero."""
    out: Tensor = _Multiply.apply(x, weight, product, real_inputs)
    return out


class _Multiply(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product, real_inputs: int) -> Tensor:
        ctx.again, ctx.product, ctx.real_inputs, ctx.shape = note.read(x).again, product, real_inputs, x.shape
        ctx.save_for_backward(weight, *((x,) if ctx.again is None else ()))
        return product.forward(_flat(x), weight).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        x = kept[0] if kept else ctx.again(None)
        dx, dw = ctx.product.backward(_flat(gradients[0]), _flat(x), weight)
        if ctx.real_inputs < dw.shape[1]:
            dw[:, ctx.real_inputs :] = 0.0  # an activation may make something of padding, which must not be learnt from
        return dx.view(ctx.shape), dw, None, None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
