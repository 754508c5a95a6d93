"""Division of a step's gradients by its number of valid targets over dp, cp and pp, and the loss scale.

A target is valid unless it is IGNORE_INDEX: padding, or a token that the data masks.

[Note: the division is part of backward]

The number of valid targets of a step is known after its last microbatch, and nearly always equals that of the previous
step. So backward starts from loss_scale / (targets of the previous step), and the optimizer multiplies gradients by
(previous targets) / (targets * loss_scale). Without a loss scale this factor is exactly 1 when the number is unchanged:
no pass over the gradients.

The number of targets and the scale stay on the device, so the host never waits for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.precision.loss_scale import LossScale, LossScaler


class LossNormalizer:
    """The seed of backward and the factor that the optimizer applies to its gradients."""

    def __init__(self, axis: MeshAxis, loss_scale: LossScale, device: torch.device):
        """`axis` spans the ranks that hold different tokens, and all pipeline stages."""
        self.axis = axis
        self.last_num_targets = torch.ones((), dtype=torch.float64, device=device)
        self.loss_scaler = LossScaler(loss_scale, device)

    @property
    def backward_seed(self) -> Tensor:
        """The gradient of the loss sum that backward starts from."""
        return self.loss_scaler.scale / self.last_num_targets

    def reduce(self, totals: Tensor) -> Tensor:
        """All-reduce (loss sum, number of targets) in place; return `grad_scale`."""
        self.axis.all_reduce(totals)
        return self.grad_scale(totals)

    def grad_scale(self, totals: Tensor) -> Tensor:
        """The factor that turns gradients into those of the mean loss, from totals over all ranks."""
        return self.last_num_targets / (totals[1].clamp(min=1.0) * self.loss_scaler.scale)

    def end_step(self, totals: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Remember the number of targets and adapt the loss scale; return the scale of this step and of the next."""
        has_targets, scale = totals[1] > 0, self.loss_scaler.scale
        self.last_num_targets = torch.where(has_targets, totals[1], self.last_num_targets)
        self.loss_scaler.update(finite, has_targets & finite)
        return scale, self.loss_scaler.scale
