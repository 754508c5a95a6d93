"""When a stage's flat units are gathered and reduced, with several microbatches under way at once.

    zero 0, 1   a unit's gradients add up over the step and are reduced after the last backward that adds to them
    zero 2, 3   they are reduced after every backward; sums may be cut anywhere, so it does not matter whose they are

Layers gather themselves (parallel/dp/sharded_model.py). What is kept is gathered before its first use and stays for the step. All
ranks of dp follow the same schedule, so they meet in the same order.
"""

from __future__ import annotations

from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.sharded_model import ShardedModel


class StageParamGroups:
    """The flat units of a rank's stages; `part` is the place of a stage among them."""

    def __init__(self, sharded_model: ShardedModel):
        self.sharded_model = sharded_model
        self._awaiting_backward: dict[int, set[int]] = {}

    def begin_step(self) -> None:
        for unit in self.sharded_model.param_groups:
            unit.begin_step()
        self._awaiting_backward = {
            number: {part for part, found in enumerate(self.sharded_model.stage_groups) if unit in found}
            for number, unit in enumerate(self.sharded_model.param_groups)
        }

    def unshard(self, local_stage: int) -> None:
        """Before a forward or backward: what the stage keeps is whole."""
        for unit in self.sharded_model.stage_groups[local_stage]:
            if unit.spec.stays_unsharded:
                unit.start_unshard()
        for unit in self.sharded_model.stage_groups[local_stage]:
            if unit.spec.stays_unsharded or not unit.policy.reshards_params:
                unit.unshard()

    def unshard_layers(self, local_stage: int) -> None:
        """Before a second half of backward that reads parameters: the layers' hooks do not see it."""
        for unit in self.sharded_model.stage_groups[local_stage]:
            unit.unshard()

    def begin_backward(self, local_stage: int) -> None:
        for unit in self.sharded_model.stage_groups[local_stage]:
            unit.begin_microbatch()

    def end_backward(self, local_stage: int, *, last: bool) -> None:
        """After a backward whose gradients are all there. `last` is of the step."""
        for number, unit in reversed(list(enumerate(self.sharded_model.param_groups))):
            if unit not in self.sharded_model.stage_groups[local_stage]:
                continue
            if last:
                self._awaiting_backward[number].discard(local_stage)
            if unit.policy.reduce_scatter_every_microbatch:
                unit.finish_reduce_scatter(last=False)
                unit.start_grad_reduction()
            elif not self._awaiting_backward[number]:
                unit.start_grad_reduction()
        self.reshard_layers(local_stage)

    def reshard_layers(self, local_stage: int) -> None:
        for unit in self.sharded_model.stage_groups[local_stage]:
            if not unit.spec.stays_unsharded:
                unit.reshard()

    def finish_step(self) -> None:
        """At the step's end: every gradient is reduced, and what was kept for the step is freed."""
        for unit in self._in_backward_order():
            unit.finish_reduce_scatter(last=True)
        for unit in self._in_backward_order():
            unit.finish_grad_reduction()
            unit.reshard()

    def _in_backward_order(self) -> list[ParamGroup]:
        return self.sharded_model.param_groups[::-1]
