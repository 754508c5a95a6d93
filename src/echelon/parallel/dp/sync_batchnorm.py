"""BatchNorm over all data-parallel ranks: statistics of the global microbatch, as one device computes them.

Each layer all-reduces (count, sum of x) and then the sum of squared deviations over dp in forward, and the gradients of
these sums in backward: two small all-reduces each way. It takes two passes rather than a sum of squares, because the
mean may be much larger than the deviation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class SyncBatchNorm(nn.Module):
    """Synchronized replacement of a BatchNorm, with its parameters, buffers and names."""

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
        sums = self._all_reduce(torch.cat([x.sum(dims), rows]))
        count, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        deviation = x - mean.view(1, -1, *([1] * (x.dim() - 2)))
        variance = self._all_reduce(deviation.square().sum(dims)) / count
        if self.running_mean is not None and self.training:
            self._track(mean.detach(), variance.detach() * count / (count - 1))
        return mean, variance

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the axis. The gradient is an all-reduce too, because every rank's loss depends on the sum."""

        def all_reduce(x: Tensor) -> Tensor:
            return self.axis.all_reduce(x.clone())

        return with_backward(x, all_reduce, all_reduce)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def apply_sync_batchnorm(context: TransformContext) -> None:
    """Compute BatchNorm statistics over all data-parallel ranks."""
    if context.layout.dp > 1:
        convert_sync_batchnorm(context.model, context.axes["dp"])


def convert_sync_batchnorm(model: nn.Module, axis: MeshAxis) -> int:
    """Replace every BatchNorm of a model, and return how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BatchNorm):
                setattr(parent, name, SyncBatchNorm(child, axis))
                count += 1
    return count


def sync_batchnorm_channels(model: nn.Module) -> dict[str, int]:
    """Return the channels of every synchronized BatchNorm by module name."""
    return {name: module.num_features for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)}
