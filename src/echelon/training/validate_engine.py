"""What cannot be asked of an engine together."""

from __future__ import annotations

import torch

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.optim import offload_support
from echelon.optim.update_rule import UpdateRule
from echelon.precision.loss_scale import LossScale
from echelon.training import optimizer_in_backward


def validate_engine(
    rule: UpdateRule, layout: Layout, *, clip: float, master: torch.dtype, loss_scale: LossScale
) -> None:
    if rule.in_backward:
        optimizer_in_backward.check_in_backward_support(layout, clip, loss_scale)
    offload_support.check_offload(rule, layout.offload, master="none" if master.itemsize < 4 else "float32")
    if layout.pp == 1 or layout.schedule not in ASYNC_SCHEDULES:
        return
    if rule.ema:
        raise ValueError(
            f"older versions of the weights are under way when an evaluation would use their average "
            f"(schedule={layout.schedule}, optimizer.ema={rule.ema:g}); use schedule=1f1b, or ema=0"
        )
    if loss_scale.is_dynamic:
        raise ValueError(
            f"stages of schedule={layout.schedule} update at different times and could not agree on a loss scale; "
            "give a fixed one (precision.loss_scale=1024), or use schedule=1f1b"
        )
