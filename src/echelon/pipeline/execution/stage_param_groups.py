"""When the parameter groups of a stage are unsharded and reduced, with several microbatches in flight.

    zero 0, 1   gradients accumulate over the step and are reduced after the last backward that adds to them
    zero 2, 3   they are reduced after every backward; a reduction may mix microbatches, since gradients add up

Layers unshard themselves (parallel/dp/sharded_model.py). Groups that stay unsharded are gathered before their first use
in a step. All dp ranks follow the same schedule, so their collectives match.
"""

from __future__ import annotations

from echelon.parallel.dp.sharded_model import ShardedModel


class StageParamGroups:
    """The parameter groups of a rank's stages; `local_stage` is the index of a stage on its rank."""

    def __init__(self, sharded_model: ShardedModel):
        self.sharded_model = sharded_model
        self._awaiting_backward: dict[int, set[int]] = {}

    def begin_step(self) -> None:
        for group in self.sharded_model.param_groups:
            group.reduction.begin_step()
        self._awaiting_backward = {
            number: {part for part, groups in enumerate(self.sharded_model.stage_groups) if group in groups}
            for number, group in enumerate(self.sharded_model.param_groups)
        }

    def unshard(self, local_stage: int) -> None:
        """Unshard the groups that a stage keeps unsharded, before a forward or backward."""
        for group in self.sharded_model.stage_groups[local_stage]:
            if group.spec.stays_unsharded:
                group.start_unshard()
        for group in self.sharded_model.stage_groups[local_stage]:
            if group.spec.stays_unsharded or not group.policy.reshards_params:
                group.unshard()

    def unshard_layers(self, local_stage: int) -> None:
        """Unshard all groups of a stage before a W that reads parameters: the layers' hooks do not run in it."""
        for group in self.sharded_model.stage_groups[local_stage]:
            group.unshard()

    def begin_backward(self, local_stage: int) -> None:
        for group in self.sharded_model.stage_groups[local_stage]:
            group.begin_microbatch()

    def end_backward(self, local_stage: int, *, last: bool) -> None:
        """Reduce gradients after a backward; `last` if it is the stage's last of the step."""
        for number, group in reversed(list(enumerate(self.sharded_model.param_groups))):
            if group not in self.sharded_model.stage_groups[local_stage] or not group.spec.trainable:
                continue
            if last:
                self._awaiting_backward[number].discard(local_stage)
            if group.policy.reduce_scatter_every_microbatch:
                group.reduction.finish_reduce_scatter(last=False)
                group.reduction.start(group)
            elif not self._awaiting_backward[number]:
                group.reduction.start(group)
        self.reshard_layers(local_stage)

    def reshard_layers(self, local_stage: int) -> None:
        for group in self.sharded_model.stage_groups[local_stage]:
            if not group.spec.stays_unsharded:
                group.reshard()

    def finish_step(self) -> None:
        """Finish all reductions of a step, and reshard."""
        in_backward_order = self.sharded_model.trainable_groups[::-1]
        for group in in_backward_order:
            group.reduction.finish_reduce_scatter(last=True)
        for group in in_backward_order:
            group.reduction.finish()
        for group in self.sharded_model.param_groups:
            group.reshard()
