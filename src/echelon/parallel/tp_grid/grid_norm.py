"""Norms over sharded columns: one small collective each way, of a number or two per token.

    RMSNorm     forward: sums of squares are all-reduced         backward: sum(g * n) is all-reduced
    LayerNorm   forward: means and sums of squares around them   backward: sum(g) and sum(g * n) are all-reduced
                are all-gathered, and combined exactly

with n the normalized values and g the gradient times the weight. Padded columns are left out of the statistics, and are
zero afterwards, as are their gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import tensor_metadata
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp_grid import cost as tp_grid_cost

Statistics = tuple[Tensor | None, Tensor]
"""the mean, if the norm subtracts it, and the scale"""


class ColumnShards:
    """A dimension of `width` columns sharded over an axis, and this rank's columns without padding."""

    def __init__(self, axis: MeshAxis, width: int):
        self.axis, self.width, self.padded_width = axis, width, -(-width // axis.size)
        self.widths = [min(max(width - place * self.padded_width, 0), self.padded_width) for place in range(axis.size)]
        self.local_width = self.widths[axis.index]
        self._weights: Tensor | None = None

    def widths_on(self, like: Tensor) -> Tensor:
        """Return the widths on a device, copied there once: no step waits for it."""
        if self._weights is None or (self._weights.device, self._weights.dtype) != (like.device, like.dtype):
            self._weights = like.new_tensor(self.widths)
        return self._weights


class GridLayerNorm(nn.Module):
    cost = tp_grid_cost.NormSizes(reduced=2, gathered=2)
    recompute_output = False
    """backward recomputes the output instead of saving it (memory/checkpointing/checkpoint_policy.py)"""
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, columns: ColumnShards, epsilon: float | None
    ):
        """`epsilon` defaults to the machine epsilon of the input's dtype, as in torch."""
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.columns, self.epsilon = columns, epsilon

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean, squares = self.mean_and_squares(x)
            epsilon = torch.finfo(x.dtype).eps if self.epsilon is None else self.epsilon
            statistics = (mean, (squares / self.columns.width + epsilon).rsqrt())
        out: Tensor = _GridNormFunction.apply(x, self.weight, self.bias, statistics, self.columns)
        if self.recompute_output:
            recompute = partial(_apply_norm, x.detach(), self.weight, self.bias, statistics, self.columns)
            tensor_metadata.attach(out, TensorMetadata(recompute=lambda _gradient: recompute()))
        return out

    def mean_and_squares(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the mean of all columns, and the sum of squares around it, from those of each rank's columns.

        [..., 1] each. The sum around the common mean is each rank's own, plus its count times the squared distance of
        its mean: no difference of two large numbers.
        """
        real = _unpadded_columns(x, self.columns)
        local = real.new_zeros(2, *x.shape[:-1], 1)
        if self.columns.local_width:
            local[0] = real.mean(-1, keepdim=True)
            local[1] = (real - local[0]).square().sum(-1, keepdim=True)
        means, squares = self.columns.axis.all_gather(local).unbind(1)
        counts = self.columns.widths_on(local).view(-1, *[1] * x.dim())
        mean = (means * counts).sum(0) / self.columns.width
        return mean, (squares + counts * (means - mean).square()).sum(0)


class GridRMSNorm(GridLayerNorm):
    """A LayerNorm that subtracts no mean and adds no bias."""

    cost = tp_grid_cost.NormSizes(reduced=1, gathered=0)

    def __init__(self, weight: nn.Parameter | None, columns: ColumnShards, epsilon: float | None):
        super().__init__(weight, None, columns, epsilon)

    def mean_and_squares(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        real = _unpadded_columns(x, self.columns)
        return None, self.columns.axis.all_reduce((real * real).sum(-1, keepdim=True))


class NormOfStream(nn.Module):
    """What a norm of a residual stream after an addition returns: both."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x + delta, its norm)."""
        s = x if delta is None else x + delta
        return s, super().forward(s)


class GridStreamRMSNorm(NormOfStream, GridRMSNorm):  # type: ignore[misc]
    """RMSNorm of a residual stream."""


class GridStreamLayerNorm(NormOfStream, GridLayerNorm):  # type: ignore[misc]
    """LayerNorm of a residual stream."""


@torch.no_grad()
def _apply_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, columns: ColumnShards
) -> Tensor:
    out = _normalized(x, *statistics)
    if weight is not None:
        out = out * weight
    return _zero_padding((out if bias is None else out + bias).to(x.dtype), columns)


def _normalized(x: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
    wide = x.to(scale.dtype)
    return (wide if mean is None else wide - mean) * scale


class _GridNormFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, columns: ColumnShards
    ) -> Tensor:
        ctx.columns = columns
        ctx.save_for_backward(x, weight, bias, *statistics)
        return _apply_norm(x, weight, bias, statistics, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        axis, width = ctx.columns.axis, ctx.columns.width
        n, dy = _normalized(x, mean, scale), gradients[0].to(scale.dtype)
        g = dy if weight is None else dy * weight
        along = (g * n).sum(-1, keepdim=True)
        if mean is None:
            along = axis.all_reduce(along) / width
        else:
            shift, along = (axis.all_reduce(torch.stack([g.sum(-1, keepdim=True), along])) / width).unbind(0)
            g = g - shift
        dx = _zero_padding(((g - n * along) * scale).to(x.dtype), ctx.columns)
        return dx, _vector_grad(dy * n, weight), _vector_grad(dy, bias), None, None


def _unpadded_columns(x: Tensor, columns: ColumnShards) -> Tensor:
    """Return the columns without padding, in the dtype of the statistics."""
    return x[..., : columns.local_width].to(torch.promote_types(x.dtype, torch.float32))


def _zero_padding(x: Tensor, columns: ColumnShards) -> Tensor:
    if columns.local_width < columns.padded_width:
        x[..., columns.local_width :] = 0.0
    return x


def _vector_grad(gradient: Tensor, vector: Tensor | None) -> Tensor | None:
    """Return the gradient of a weight or bias: the sum over all tokens."""
    return None if vector is None else gradient.flatten(0, -2).sum(0).to(vector.dtype)
