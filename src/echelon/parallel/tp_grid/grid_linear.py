"""A linear layer on a grid: its input, its weight and its output are all sharded in two dimensions.

A `GridMatmul` (summa.py, matmul_3d.py) multiplies the blocks. It does not decide what is saved: that is this rank's
blocks of the input and of the weight, or no input if it can be recomputed (recompute=ops). Layers that read one input
(q, k and v, or gate and up) are one GEMM of several weights: the input is sent once, and so is its gradient.
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
MatmulGrads = tuple[Tensor, list[Tensor]]
"""gradients of x and of the weights"""


class GridMatmul(Protocol):
    """x W^T for several W, of block-sharded matrices: x [tokens, inputs], W as stored.

    `outputs` are the columns of each result on a rank.
    """

    def forward(self, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> list[Tensor]: ...

    def backward(self, dys: Tensors, x: Tensor, weights: Tensors, outputs: Sequence[int]) -> MatmulGrads: ...


class GridLinear(nn.Module):
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, matmul: GridMatmul, unpadded_inputs: int, cost: tp_grid_cost.LinearSizes):
        """`unpadded_inputs` are those of the weight's block without padding."""
        super().__init__()
        self.weight, self.matmul, self.unpadded_inputs, self.cost = linear.weight, matmul, unpadded_inputs, cost
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x, (self,))[0]

    @staticmethod
    def together(x: Tensor, layers: Sequence[GridLinear]) -> tuple[Tensor, ...]:
        """Return the outputs of layers that read the same input."""
        weights, outputs = [layer.weight for layer in layers], [layer.cost.outputs for layer in layers]
        ys = grid_matmul(x, weights, layers[0].matmul, outputs, layers[0].unpadded_inputs)
        return tuple(y if layer.bias is None else y + layer.bias for y, layer in zip(ys, layers, strict=True))


def grid_matmul(
    x: Tensor, weights: Tensors, matmul: GridMatmul, outputs: Sequence[int], unpadded_inputs: int
) -> tuple[Tensor, ...]:
    """Multiply [..., inputs] to each [..., outputs]; weights of padded inputs stay zero."""
    ys: tuple[Tensor, ...] = _GridMatmulFunction.apply(x, matmul, outputs, unpadded_inputs, *weights)
    return ys


class _GridMatmulFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matmul: GridMatmul, outputs: Sequence[int], unpadded_inputs: int, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.matmul, ctx.outputs, ctx.unpadded_inputs, ctx.num_weights = matmul, outputs, unpadded_inputs, len(weights)
        ctx.recompute, ctx.shape = tensor_metadata.read(x).recompute, x.shape
        ctx.save_for_backward(*weights, *((x,) if ctx.recompute is None else ()))
        return tuple(y.view(*x.shape[:-1], -1) for y in matmul.forward(_flatten_tokens(x), weights, outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weights = saved[: ctx.num_weights]
        x = ctx.recompute(None) if len(saved) == ctx.num_weights else saved[-1]
        dys = [_flatten_tokens(dy) for dy in gradients]
        dx, dws = ctx.matmul.backward(dys, _flatten_tokens(x), weights, ctx.outputs)
        for dw in dws if ctx.unpadded_inputs < x.shape[-1] else ():
            dw[:, ctx.unpadded_inputs :] = 0.0  # activations of padding may be nonzero; their weights are not trained
        ctx.recompute = _graph_freed  # it holds tensors that autograd does not know of
        return dx.view(ctx.shape), None, None, None, *dws


def _graph_freed(_gradient: Tensor | None) -> Tensor:
    raise RuntimeError(
        "recompute=ops frees its tensors after one backward pass; use recompute=none for two of them (retain_graph)"
    )


def _flatten_tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
