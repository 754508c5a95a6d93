"""A linear layer on a grid: its input, its weight and its output are all divided in two dimensions.

How the blocks meet is a `Product` (summa.py, cube.py). It has no say in what is kept: that is this rank's own blocks of
the input and of the weight, or nothing of an input that its maker makes again (recompute=ops). Layers that read one
input (q, k and v, or gate and up) are one product of several weights: the input travels once, and so does its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import tensor_metadata
from echelon.parallel.tp_grid import cost as tp_grid_cost

Tensors = Sequence[Tensor]


class GridMatmul(Protocol):
    """x W^T, for each of some W, of matrices in blocks, of which each rank holds one: x [tokens, inputs], W as stored.

    `outputs` are the columns of each result on a rank.
    """

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]: ...

    def backward(
        self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradients of x and of the weights."""
        ...


class GridLinear(nn.Module):
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        matmul: GridMatmul,
        unpadded_inputs: int,
        cost: tp_grid_cost.LinearSizes,
    ):
        """`real_inputs` are those of the weight's block that are no padding."""
        super().__init__()
        self.weight, self.matmul, self.unpadded_inputs, self.cost = weight, matmul, unpadded_inputs, cost
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x, (self,))[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence[GridLinear]) -> tuple[Tensor, ...]:
        """The outputs of layers that read the same input."""
        weights, outputs = [layer.weight for layer in layers], [layer.cost.outputs for layer in layers]
        found = grid_matmul(x, weights, layers[0].matmul, outputs, layers[0].unpadded_inputs)
        pairs = zip(found, layers, strict=True)
        return tuple(y if layer.bias is None else y + layer.bias for y, layer in pairs)


def grid_matmul(
    x: Tensor, weights: Tensors, matmul: GridMatmul, outputs: Sequence[int], unpadded_inputs: int
) -> tuple[Tensor, ...]:
    """[..., inputs] to each [..., outputs]. Of the inputs so many are real; the weights of the others stay zero."""
    found: tuple[Tensor, ...] = _GridMatmulFunction.apply(x, matmul, outputs, unpadded_inputs, *weights)
    return found


class _GridMatmulFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, product: GridMatmul, outputs: Sequence[int], real_inputs: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.matmul, ctx.outputs, ctx.unpadded_inputs, ctx.num_weights = product, outputs, real_inputs, len(weights)
        ctx.again, ctx.shape = tensor_metadata.read(x).recompute, x.shape
        ctx.save_for_backward(*weights, *((x,) if ctx.again is None else ()))
        return tuple(y.view(*x.shape[:-1], -1) for y in product.forward(_flatten_tokens(x), weights, outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        weights = kept[: ctx.num_weights]
        x = ctx.again(None) if len(kept) == ctx.num_weights else kept[-1]
        dx, dws = ctx.matmul.backward(
            [_flatten_tokens(dy) for dy in gradients], _flatten_tokens(x), weights, ctx.outputs
        )
        for dw in dws if ctx.unpadded_inputs < x.shape[-1] else ():
            dw[:, ctx.unpadded_inputs :] = 0.0  # an activation may make something of padding, which is not to be learnt
        ctx.again = _graph_freed  # it held tensors, which autograd does not know of
        return dx.view(ctx.shape), None, None, None, *dws


def _graph_freed(_gradient: Tensor | None) -> Tensor:
    raise RuntimeError(
        "what recompute=ops makes again is let go of after one backward pass; "
        "use recompute=none to go backward twice (retain_graph)"
    )


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
