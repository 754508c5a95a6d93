"""ZeRO 0 to 3, FSDP and HSDP: one mechanism, four policies.

The data-parallel ranks form `num_replicas` groups of `num_shards` ranks. The flat buffer of each parameter group
(layout/placement.py) is cut into `num_shards` equal shards, and a rank's optimizer updates its own shard. Everything
else is when to move what:

    zero  shards  gradients                                             parameters
    0     1       all-reduce over the replicas, once a step             unsharded, never move
    1     dp      reduce-scatter once a step                            all-gather once a step, before first use
    2     dp      reduce-scatter every microbatch, keep the shard       all-gather once a step, before first use
    3     dp      reduce-scatter every microbatch, keep the shard       all-gather before each use, freed after it

With `shard=` smaller than dp (HSDP) the shards of a group are all-reduced over the replicas once a step. Ranks of cp
hold the same parameters, and each has a partial sum of every gradient: they shard the groups too if all of dp does,
and are replicas otherwise. Experts have other copies, and so shards of their own. Frozen parameters have neither
gradients nor states: zero 3 alone shards them. sharded_model.py executes this; cost.py counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.placement import ParamGroupSpec


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """When a ZeRO stage gathers, frees and reduces the parameter groups, and over which axes."""

    num_shards: int
    """ranks that shard a parameter group"""
    num_replicas: int
    """groups of such ranks that hold the same shards"""
    shard_axis: str = "shard"
    """the mesh axis of the ranks that shard a group"""
    replica_axis: str = "replica"
    """the mesh axis of the ranks that hold the same shards"""
    reduce_scatter_every_microbatch: bool
    """gradients leave their unsharded buffer after each microbatch (2, 3) or once a step (0, 1)"""
    reshards_params: bool
    """unsharded parameters are freed after use (3)"""
    reshard_after_forward: bool = True
    """with `reshards_params`: free after forward and gather again for backward; otherwise free once, after backward"""
    prefetch: int = 1
    """with `reshards_params`: groups gathered ahead of the one in use; otherwise all groups are, once a step"""
    params_on_host: bool = False
    """parameters and gradients live on the host: fetched before each use, freed after it, sent every microbatch"""
    has_weight_versions: bool = False
    """the optimizer updates while older versions of the parameters are in use (asynchronous schedules)"""
    accumulates_grads: bool = True
    """a gradient is a sum: over microbatches, over ranks, or in the user's loop"""
    user_loop: bool = False
    """the loop and the optimizer are the user's: they read master weights and gradients of one dtype"""

    @property
    def keeps_param_shard(self) -> bool:
        """A rank's slice of the unsharded parameters stays in place from step to step, for the optimizer to update."""
        return not self.reshards_params and not self.has_weight_versions

    def splits_master_weights(self, *, compute_bytes: int, master_bytes: int) -> bool:
        """Master weights are stored as bfloat16 and the rest of their bits (master_weights.py)."""
        return (compute_bytes, master_bytes) == (2, 4) and not self.user_loop

    def grads_are_final(self, group: ParamGroupSpec) -> bool:
        """Each gradient of a group is produced once a step and never summed: a wider dtype gains nothing."""
        return not self.accumulates_grads and not any(param.partial_grad_axes for param in group.params)

    def grads_stay_in_compute_dtype(self, group: ParamGroupSpec) -> bool:
        """The device never adds to a gradient: it is final, or the host accumulates it."""
        return self.grads_are_final(group) or (self.params_on_host and self.num_shards * self.num_replicas == 1)

    @property
    def finishes_reduce_scatter_early(self) -> bool:
        """A group's reduce-scatter is finished while later ones run: to free its buffer, or to start the all-reduce."""
        scatters = self.reduce_scatter_every_microbatch or self.num_replicas > 1
        return self.params_on_host or (self.num_shards > 1 and scatters)

    def for_frozen(self) -> ShardingPolicy:
        """Return the policy of a group without gradients and states: sharded if parameters are freed after use."""
        kept = replace(self, reduce_scatter_every_microbatch=False, has_weight_versions=False, accumulates_grads=False)
        if self.reshards_params:
            return kept
        return replace(kept, num_shards=1, num_replicas=1, shard_axis="alone", replica_axis="alone")

    def with_params_on_host(self) -> ShardingPolicy:
        """Return the policy of a group whose parameters live on the host."""
        return replace(self, params_on_host=True, reduce_scatter_every_microbatch=True, reshards_params=True)


def sharding_policy(
    layout: Layout, *, reshard_after_forward: bool = True, prefetch: int = 1, user_loop: bool = False
) -> ShardingPolicy:
    """Return the policy of all parameters but the experts'."""
    cp_shards = layout.cp > 1 and bool(layout.zero) and layout.shard == layout.dp
    shards = layout.num_shards * (layout.cp if cp_shards else 1)
    return ShardingPolicy(
        num_shards=shards,
        num_replicas=layout.dp * layout.cp // shards,
        shard_axis="shard*cp" if cp_shards else "shard",
        replica_axis="replica*cp" if layout.cp > 1 and not cp_shards else "replica",
        reduce_scatter_every_microbatch=layout.zero >= 2 and shards > 1,
        reshards_params=layout.zero == 3 and shards > 1,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        has_weight_versions=layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES,
        accumulates_grads=layout.dp * layout.cp * layout.pp * layout.accumulate > 1 or user_loop,
        user_loop=user_loop,
    )


def expert_sharding_policy(layout: Layout, dense: ShardingPolicy) -> ShardingPolicy:
    """Return the policy of experts, which ep x etp ranks divide: the remaining ranks (edp) shard or replicate them.

    Under HSDP the copies of one HSDP group shard them, and the copies of other groups are replicas.
    """
    copies, shards = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp), layout.num_expert_shards
    shard_axis, replica_axis = ("edp", "alone") if shards == copies else ("eshard", "ereplica")
    return replace(
        dense,
        num_shards=shards,
        num_replicas=copies // shards,
        shard_axis=shard_axis if layout.zero else "alone",
        replica_axis=replica_axis if layout.zero else "edp",
        reduce_scatter_every_microbatch=layout.zero >= 2 and shards > 1,
        reshards_params=layout.zero == 3 and shards > 1,
        accumulates_grads=dense.accumulates_grads or copies > 1,
    )
