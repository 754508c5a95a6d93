"""Updates inside backward: gradients need not all live at once.

    last microbatch    forward of all layers, then the number of targets of the step is summed over the ranks
    backward           layer 3: gradients, reduction starts
                       layer 2: gradients, reduction starts;  layer 3: reduced, updated, gradients let go
                       layer 1: gradients, reduction starts;  layer 2: reduced, updated, gradients let go ...

The number of targets divides the gradients, and is known before the last backward begins; so it is summed then, and not
after it. A norm is known when every gradient is, so nothing can be clipped by it; it is added up layer by layer, to be
shown. A step with a gradient that is not finite cannot be left out either, so a run ends there. Gradients of two units
are there at a time, and of the root, which backward comes to first and last; where a step has several microbatches they
are added up, and all of them are there when the last begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.layout import Layout
from echelon.optim.per_unit_optimizer import PerGroupOptimizer
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel
from echelon.precision.loss_scale import LossScale
from echelon.training.grad_norm import GradientNorm, PiecesByAxis, all_reduce_pieces


def check_in_backward_support(layout: Layout, clip: float, loss_scale: LossScale) -> None:
    """Raises where an update cannot run in backward."""
    if clip:
        raise ValueError(
            f"clipping needs the norm of all gradients, and updates in backward let them go before it is known "
            f"(clip={clip:g}, optimizer.in_backward=true); use clip=0"
        )
    if loss_scale.is_dynamic:
        raise ValueError(
            "a dynamic loss scale leaves out steps whose gradients overflow, and updates in backward have happened "
            "before that is known (optimizer.in_backward=true); use precision.loss_scale=1024, or dtype=bfloat16"
        )
    if layout.pp > 1:
        raise ValueError(
            "in a pipeline gradients of several microbatches add up, so that all of them live until the last, and only "
            f"the last stage knows the number of targets (pp={layout.pp}, optimizer.in_backward=true); use pp=1"
        )


class OptimizerInBackward:
    """The updates of one rank's units, each when its reduction is through."""

    def __init__(self, parallel: ParallelModel, rule: UpdateRule, grad_norm: GradientNorm, partial: PiecesByAxis):
        self.optimizer = PerGroupOptimizer(parallel, rule)
        self._norm, self._partial = grad_norm, partial
        self._flat = parallel.sharded_model
        self._flat.on_grad_reduced = self._update_group
        for unit in self._flat.param_groups:
            unit.lazy_grads = True
            unit.free_grads()
        self._lr, self._scale = 0.0, torch.ones((), dtype=torch.float64, device=parallel.options.device)
        self._has_targets = torch.ones((), dtype=torch.bool, device=parallel.options.device)
        self._norms = torch.zeros(len(grad_norm.slices), dtype=torch.float64, device=parallel.options.device)

    def begin(self, lr: float, scale: Tensor, has_targets: Tensor) -> None:
        """Before the last backward of a step."""
        self._lr, self._scale, self._has_targets = lr, scale, has_targets
        self._norms = torch.zeros_like(self._norms)

    def grad_norm(self) -> tuple[Tensor, Tensor]:
        """Of the step's gradients before they are multiplied by the scale, and those of this rank's parts."""
        return self._norm.reduce_norm(self._norms), self._norms

    def _update_group(self, unit: ParamGroup) -> None:
        for axis, held in self._partial:
            all_reduce_pieces(axis, [(other, piece) for other, piece in held if other is unit])
        self._norm.add_group(unit, self._norms)
        self.optimizer.optimizer_of(unit).step(self._lr, self._scale, self._has_targets)
        unit.after_update()
        unit.free_grads()
