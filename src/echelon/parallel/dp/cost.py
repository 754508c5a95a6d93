"""What data parallelism and ZeRO cost: the collectives of a step and the bytes of its states. No torch."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from echelon.layout.collective import Collective
from echelon.layout.placement import ParamGroupSpec
from echelon.parallel.dp.zero import ShardingPolicy


def collectives(
    groups: Sequence[ParamGroupSpec],
    policy: ShardingPolicy,
    *,
    accumulate: int,
    compute_bytes: int,
    reduce_bytes: int,
    stage_uses: Mapping[str, int] | None = None,
    expert_policy: ShardingPolicy | None = None,
    recomputed: Collection[str] = (),
    paged: Container[str] = (),
) -> Iterable[Collective]:
    """Yield the collectives of one step, group by group; `compute_bytes` and `reduce_bytes` are of one element.

    `expert_policy` is the policy of expert groups. Groups in `recomputed` lie inside recomputed layers, which gather
    and free them once more; parameters of groups in `paged` live on the host.

    In a pipeline `stage_uses` counts the stages of a rank that use each group. There a group is reduced after each of
    them, groups that stay unsharded are gathered once a step, and layers are freed after every use.
    """
    in_pipeline = stage_uses is not None
    last = next((group.module for group in reversed(groups) if not group.stays_unsharded and not in_pipeline), None)
    for index, group in enumerate(groups):
        group_policy = expert_policy if group.is_expert and expert_policy is not None else policy
        group_policy = group_policy if group.trainable else group_policy.for_frozen()
        group_policy = group_policy.with_params_on_host() if group.name in paged else group_policy
        full_numel, uses = group.num_shards * group.shard_numel, stage_uses[group.name] if stage_uses else 1
        axis, later = group_policy.shard_axis, index > 0
        if group_policy.num_shards > 1:
            # The last layer stays unsharded between forward and backward, which needs it first.
            regathers = (
                (group_policy.reshard_after_forward or in_pipeline)
                and not group.stays_unsharded
                and group.module != last
            )
            gathers = (2 if regathers else 1) * accumulate if group_policy.reshards_params else 1
            if group_policy.reshards_params and regathers and group.name in recomputed:
                gathers += accumulate
            if in_pipeline and group.stays_unsharded:
                gathers = 1
            size = full_numel * group.element_bytes(compute_bytes)
            yield Collective(
                op="all_gather", axis=axis, bytes=size, count=gathers, overlapped=later, purpose="parameters"
            )
        if not group.trainable:
            continue
        if group_policy.num_shards > 1:
            count = accumulate * uses if group_policy.reduce_scatter_every_microbatch else 1
            size = full_numel * group.element_bytes(reduce_bytes)
            yield Collective(
                op="reduce_scatter", axis=axis, bytes=size, count=count, overlapped=later, purpose="gradients"
            )
        if group_policy.num_replicas > 1:
            count = accumulate * uses if group_policy.params_on_host else 1
            size = group.shard_numel * group.element_bytes(reduce_bytes)
            axis = group_policy.replica_axis
            yield Collective(op="all_reduce", axis=axis, bytes=size, count=count, overlapped=later, purpose="gradients")


def sync_batchnorm_collectives(
    channels: Iterable[int], *, accumulate: int, element_bytes: int, recomputed: bool = False
) -> Iterable[Collective]:
    """Yield a step's all-reduces of batch statistics: per layer and microbatch, of (channels + 1) and of channels."""
    passes = 3 if recomputed else 2  # forward, its recomputation, backward
    for count in channels:
        for size in ((count + 1) * element_bytes, count * element_bytes):
            times = passes * accumulate
            yield Collective(op="all_reduce", axis="dp", bytes=size, count=times, purpose="batch statistics")


def state_bytes(
    groups: Sequence[ParamGroupSpec],
    policy: ShardingPolicy,
    *,
    compute_bytes: int,
    master_bytes: int,
    moments: int = 0,
    moment_bytes: float | None = None,
    reduce_bytes: int = 0,
    num_versions: int = 1,
    float16: bool = False,
    expert_policy: ShardingPolicy | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank holds between steps, by category; `moments` is optimizer values per element.

    `moment_bytes` and `reduce_bytes` default to the master's. An asynchronous pipeline holds `num_versions` versions
    of its parameters, the newest included. No value is stored twice: master weights of the compute dtype are a slice
    of the unsharded parameters, and float32 masters of bfloat16 parameters store the 16 bits that bfloat16 drops.
    `float16` has other bits, so its master weights are stored in full. Frozen parameters are stored
    once, in the compute dtype. On a GPU gradients are allocated lazily (grad_buffer.py): their bytes are those at the
    end of backward.
    """
    totals = dict.fromkeys(("parameters", "master", "gradients", "optimizer", "versions"), 0)
    dense_policy = policy
    for group in groups:
        policy = expert_policy if group.is_expert and expert_policy is not None else dense_policy
        if not group.trainable:
            frozen, element = policy.for_frozen(), group.element_bytes(compute_bytes)
            totals["parameters"] += 0 if frozen.reshards_params else group.num_shards * group.shard_numel * element
            totals["master"] += group.shard_numel * element if frozen.reshards_params else 0
            continue
        compute, master = group.element_bytes(compute_bytes), group.element_bytes(master_bytes)
        full_numel, shard_numel = group.num_shards * group.shard_numel, group.shard_numel
        split = policy.splits_master_weights(compute_bytes=compute, master_bytes=master) and not float16
        shares_params = (compute == master or split) and policy.keeps_param_shard
        grad_numel = shard_numel if policy.reduce_scatter_every_microbatch else full_numel
        reduced = group.element_bytes(reduce_bytes or master_bytes)
        totals["parameters"] += 0 if policy.reshards_params else full_numel * compute
        totals["master"] += shard_numel * (master - compute if shares_params else master)
        totals["gradients"] += grad_numel * (compute if policy.grads_are_final(group) else reduced)
        totals["versions"] += (num_versions - 1) * full_numel * compute
    trainable = sum(group.shard_numel for group in groups if group.trainable)
    totals["optimizer"] = round(moments * trainable * (master_bytes if moment_bytes is None else moment_bytes))
    return totals
