"""BatchNorm over all data-parallel ranks: statistics of the whole microbatch, as one device would take them.

Each layer sums (count, sum of x) and then (sum of squared deviations) over dp in forward, and the same sums'
gradients in backward: two small all-reduces each way. Two passes rather than a sum of squares, because the mean may
be large beside the deviation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from echelon.layout.collective import Collective
from echelon.parallel.comm.mesh_axis import MeshAxis

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _AllReduceSum(Function):
    """The sum over ranks; every rank's loss depends on it, so its gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradients[0].clone()), None


class SyncBatchNorm(nn.Module):
    """Takes the place of a BatchNorm and keeps its parameters, buffers and names."""

    weight: nn.Parameter | None
    bias: nn.Parameter
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, plain: BatchNorm, axis: MeshAxis):
        super().__init__()
        self.axis, self.eps, self.momentum = axis, plain.eps, plain.momentum
        self.num_features = plain.num_features
        self.register_parameter("weight", plain.weight)
        self.register_parameter("bias", plain.bias)
        self.register_buffer("running_mean", plain.running_mean)
        self.register_buffer("running_var", plain.running_var)
        self.register_buffer("num_batches_tracked", plain.num_batches_tracked)
        self.train(plain.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None and self.running_var is not None:
            mean, variance = self.running_mean, self.running_var
        else:
            mean, variance = self._statistics(x.to(torch.promote_types(x.dtype, torch.float32)))
        shape = (1, -1, *([1] * (x.dim() - 2)))
        out = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        out = out.to(x.dtype)
        if self.weight is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        rows = x.new_full((1,), x.numel() // x.shape[1])
        sums: Tensor = _AllReduceSum.apply(torch.cat([x.sum(dims), rows]), self.axis)
        count, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        deviation = x - mean.view(1, -1, *([1] * (x.dim() - 2)))
        variance: Tensor = _AllReduceSum.apply(deviation.square().sum(dims), self.axis) / count
        if self.running_mean is not None and self.training:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        return mean, variance

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def convert_sync_batchnorm(model: nn.Module, axis: MeshAxis) -> int:
    """Replaces every BatchNorm of a model; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BatchNorm):
                setattr(parent, name, SyncBatchNorm(child, axis))
                count += 1
    return count


def collectives(
    channels: Iterable[int], *, accumulate: int, element_bytes: int, recomputed: bool = False
) -> Iterable[Collective]:
    """Per layer and microbatch: (channels + 1) and channels elements, in forward, its repetition, and backward."""
    passes = 3 if recomputed else 2
    for count in channels:
        for size in (count + 1, count):
            yield Collective(
                op="all_reduce",
                axis="dp",
                bytes=size * element_bytes,
                count=passes * accumulate,
                purpose="batch statistics",
            )


def sync_batchnorm_channels(model: nn.Module) -> dict[str, int]:
    """The channels of every synchronised BatchNorm, by its name."""
    return {name: module.num_features for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)}
