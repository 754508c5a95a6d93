"""Transform of data parallelism: parameter groups, their placement and offload, and the sharded model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.layout.placement import LogicalParam, ParamGroupSpec, Placement, group_params
from echelon.parallel.comm.axis_names import EXPERT_SHARD_AXES
from echelon.parallel.comm.mesh_axis import SINGLE_RANK, MeshAxes, enumerate_groups
from echelon.parallel.dp.offload_policy import make_offload
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.param_grouping import choose_param_groups
from echelon.parallel.dp.sharded_model import ShardedModel
from echelon.parallel.dp.zero import ShardingPolicy, expert_sharding_policy
from echelon.parallel.init_weights import move_buffers
from echelon.precision.keep_fp32 import fp32_modules

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


def shard_parameters(context: TransformContext) -> None:
    """Group the parameters, shard each group over dp, and fill the shards with initial values."""
    model, layout, options, axes = context.model, context.layout, context.options, context.axes
    policy, expert_policy = context.policy, expert_sharding_policy(layout, context.policy)
    max_numel = options.max_group_bytes // options.compute_dtype.itemsize
    roots = choose_param_groups(model, options.units, max_numel=max_numel)
    axis_names = [name for each in (policy, expert_policy) for name in (each.shard_axis, each.replica_axis)]
    for name in (*axis_names, param_shard_axis(policy), param_shard_axis(expert_policy)):
        axes.get_or_add(name)
    context.placement = Placement(
        param_groups=group_params(
            [_without_gradient(param) for param in context.params],
            roots,
            policy.num_shards,
            expert_policy.num_shards,
            shard_frozen=layout.zero == 3,
        ),
        coordinates=placement_coordinates(axes, axes.rank, policy, expert_policy),
    )
    offload = make_offload(context)

    def make_group(spec: ParamGroupSpec) -> ParamGroup:
        group_policy = expert_policy if spec.is_expert else policy
        group_policy = group_policy if spec.trainable else group_policy.for_frozen()
        group_policy = group_policy.with_params_on_host() if offload.is_paged(spec) else group_policy
        return ParamGroup(spec, group_policy, axes, options, offload.host_for(spec))

    sharded = ShardedModel(context, [make_group(spec) for spec in context.placement.param_groups])
    if offload.activation_offload is not None:
        offload.activation_offload.exclude([group.unsharded_param for group in sharded.param_groups])
    sharded.init_values(context.initial_values)
    move_buffers(model, options.device, options.compute_dtype, fp32_modules(context.params))
    context.checkpointing.set_before_recompute(sharded.unshard_for_recompute)
    context.offload, context.sharded_model = offload, sharded


def _without_gradient(param: LogicalParam) -> LogicalParam:
    """Return a parameter without partial gradients if it has no gradient."""
    return param if param.trainable else replace(param, partial_grad_axes=())


def param_shard_axis(policy: ShardingPolicy) -> str:
    """Return the axis of the ranks of a stage that hold different elements of a parameter."""
    inner = "tp" if policy.shard_axis not in (*EXPERT_SHARD_AXES, SINGLE_RANK) else "etp"
    return inner if policy.shard_axis == SINGLE_RANK else f"{policy.shard_axis}*{inner}"


def placement_coordinates(
    axes: MeshAxes, rank: int, policy: ShardingPolicy, expert_policy: ShardingPolicy
) -> dict[str, int]:
    """Return a rank's coordinate on every mesh axis, and its shard and replica index in the placement record."""
    coordinates = axes.mesh.coordinates(rank)
    for prefix, each in (("", policy), ("expert ", expert_policy)):
        for name, axis in (("shard", each.shard_axis), ("replica", each.replica_axis)):
            groups = enumerate_groups(axes.mesh, axis) if axis != SINGLE_RANK else ((rank,),)
            coordinates[prefix + name] = next(ranks.index(rank) for ranks in groups if rank in ranks)
    return coordinates
