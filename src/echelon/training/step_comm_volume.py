"""Communication volume of one step on a rank, from the cost functions of all its strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.layout.collective import Collective
from echelon.layout.placement import FROZEN_SUFFIX
from echelon.memory.checkpointing.cost import RecomputedLayers
from echelon.memory.offload import cost as offload_cost
from echelon.models.pipeline_model import is_within
from echelon.moe.moe_layer import MoELayer
from echelon.optim import cost as optimizer_cost
from echelon.parallel.cp import cost as cp_cost
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp import sync_batchnorm, zero
from echelon.parallel.ep import cost as ep_cost
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp_strategy import tp_strategy

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def step_collectives(engine: Engine, traffic: tp_cost.TransformerSizes | None) -> list[Collective]:
    """See `Engine.collectives`."""
    layout, pipeline, parallel = engine.layout, engine.pipeline, engine.parallel
    slices = pipeline.runtime.slice_lengths(traffic.seq_len) if pipeline is not None and traffic is not None else ()
    collectives: list[Collective] = []
    if traffic is not None:
        traffic = replace(traffic, frozen_inputs=bool(engine.adapted_linears) and not engine.trains_inputs)
        local_sizes = traffic
        if pipeline is not None:
            local_sizes = replace(pipeline.rank_share(traffic), moe_layers=len(_moe_layers(engine)))
        collectives += _expert_collectives(engine, local_sizes)
        recomputed = _recompute_counts(engine)
        if parallel.cp_context is not None:
            index = parallel.cp_context.ring_axis.index
            collectives += cp_cost.transformer_collectives(local_sizes, layout, index, recomputed)
            local_sizes = replace(local_sizes, seq_len=cp_cost.tokens_per_rank(layout, local_sizes.seq_len))
        for length in slices or (local_sizes.seq_len,):
            part = replace(local_sizes, seq_len=length)
            collectives += tp_strategy(layout).model_collectives(parallel, part, recomputed)
        collectives += pipeline.p2p_collectives(local_sizes) if pipeline is not None else []
    for name, channels in sync_batchnorm.sync_batchnorm_channels(engine.model).items():
        collectives += dp_cost.sync_batchnorm_collectives(
            [channels],
            accumulate=layout.accumulate,
            element_bytes=max(parallel.options.compute_dtype.itemsize, 4),
            recomputed=_is_recomputed(engine, name),
        )
    updates = pipeline.updates_per_step if pipeline is not None else 1
    once = _update_collectives(engine, layout.accumulate * max(len(slices), 1) // updates)
    collectives += [replace(item, count=item.count * updates) for item in once]
    collectives += pipeline.runtime.update_collectives() if pipeline is not None else []
    if parallel.axes[engine.loss_axis].size > 1:
        size = 40 if pipeline is not None and pipeline.asynchronous else 16
        collectives.append(Collective(op="all_reduce", axis=engine.loss_axis, bytes=size, purpose="loss and count"))
    return [*collectives, *engine.expert_loads.collectives()]


def _recomputed_layers(engine: Engine) -> list[str]:
    """Layers that are fully recomputed."""
    return [name for name, form in engine.parallel.checkpointing.forms.items() if form == "full"]


def _is_recomputed(engine: Engine, name: str) -> bool:
    return any(is_within(name, layer) for layer in _recomputed_layers(engine))


def _regathered_groups(engine: Engine) -> set[str]:
    """Parameter groups inside recomputed layers (memory.buffer, shard.units)."""
    regathered: set[str] = set()
    names = [group.name for group in engine.parallel.placement.param_groups]
    for layer in _recomputed_layers(engine):
        parts = [name for name in names if name.removesuffix(FROZEN_SUFFIX) != layer and is_within(name, layer)]
        config = getattr(engine.model, "config", None)
        if layer in engine.parallel.checkpointing.segment_tails and getattr(config, "dropout", 1.0) == 0.0:
            parts = parts[:-1]  # still unsharded when backward begins, where the recomputation ends
        regathered.update(parts)
    return regathered


def _recompute_counts(engine: Engine) -> RecomputedLayers:
    checkpointing = engine.parallel.checkpointing
    moe = {layer for layer in checkpointing.forms for name in _moe_layers(engine) if is_within(name, layer)}
    dense = [layer for layer in _recomputed_layers(engine) if layer not in moe]
    return RecomputedLayers(
        dense=len(dense),
        dense_tails=sum(layer in checkpointing.segment_tails for layer in dense),
        moe=len(_recomputed_layers(engine)) - len(dense),
        moe_tails=len(checkpointing.segment_tails & moe),
        attention_cores=sum("selective" in form for form in checkpointing.forms.values()),
    )


def _moe_layers(engine: Engine) -> dict[str, MoELayer]:
    return {name: module for name, module in engine.model.named_modules() if isinstance(module, MoELayer)}


def _expert_collectives(engine: Engine, traffic: tp_cost.TransformerSizes) -> Iterator[Collective]:
    """Token dispatch of gates that drop no token."""
    tails = engine.parallel.checkpointing.segment_tails
    for name, layer in _moe_layers(engine).items():
        routed = ep_cost.MoeTraffic(
            layers=1,
            sequences=traffic.batch,
            seq_len=traffic.seq_len,
            width=traffic.width,
            element_bytes=traffic.element_bytes,
            experts=layer.gate.num_experts,
            top_k=layer.gate.k,
            score_bytes=traffic.loss_bytes,
            scores=layer.gate.num_scores,
            dropout=layer.experts.drop.p > 0,
            recomputes_combine=traffic.dropout or not any(is_within(name, tail) for tail in tails),
        )
        yield from ep_cost.collectives(engine.layout, routed, recomputed=_is_recomputed(engine, name))


def _update_collectives(engine: Engine, accumulate: int) -> list[Collective]:
    """Collectives of the gradients of `accumulate` microbatches and of their update."""
    parallel, pipeline = engine.parallel, engine.pipeline
    options, groups = parallel.options, parallel.placement.param_groups
    reduce_bytes = options.grad_dtype.itemsize
    collectives = list(
        dp_cost.collectives(
            groups,
            parallel.policy,
            accumulate=accumulate,
            compute_bytes=options.compute_dtype.itemsize,
            reduce_bytes=reduce_bytes,
            stage_uses=pipeline.stages_per_param_group if pipeline is not None else None,
            expert_policy=zero.expert_sharding_policy(parallel.layout, parallel.policy),
            recomputed=_regathered_groups(engine),
            paged=[group.name for group in groups if parallel.offload.is_paged(group)],
        )
    )
    for reduced in [[group] for group in groups] if engine.update_rule.in_backward else [groups]:
        collectives += tp_cost.partial_grad_collectives(reduced, reduce_bytes, parallel.placement.shard_index)
    if engine.grad_norm.axis.size > 1:
        collectives.append(Collective(op="all_reduce", axis=engine.grad_norm.axis.name, bytes=8, purpose="norm"))
    return [*collectives, *engine.optimizer.collectives()]


def host_transfer_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of gradients and parameters that a step moves between this rank's device and host."""
    parallel, pipeline = engine.parallel, engine.pipeline
    options, groups = parallel.options, engine.parallel.placement.param_groups
    host, away = parallel.offload.host, [group for group in groups if group.name in parallel.offload.group_names]
    layers = [group.module for group in groups if not group.stays_unsharded]
    paged = None
    if host is not None and host.updates_on_device:
        master = options.master_dtype.itemsize
        paged = offload_cost.PagedUpdate(
            state_bytes=sum(group.shard_numel for group in away if group.trainable) * master
            + _offloaded_state_bytes(engine),
            host_gradient_bytes=_host_gradient_bytes(engine),
        )
    return offload_cost.step_link_bytes(
        away,
        with_params=host is not None and host.paged,
        accumulate=parallel.layout.accumulate,
        compute_bytes=options.compute_dtype.itemsize,
        gradient_bytes={group.spec.name: group.grad_dtype.itemsize for group in parallel.sharded_model.param_groups},
        reshard_after_forward=options.reshard_after_forward,
        last=layers[-1] if layers else "",
        stages=pipeline.stages_per_param_group if pipeline is not None else None,
        recomputed=_regathered_groups(engine),
        paged=paged,
    )


def _offloaded_state_bytes(engine: Engine) -> int:
    """Bytes of optimizer states off the device, row and column statistics too, without step counts."""
    parallel = engine.parallel
    return optimizer_cost.rank_state_bytes(
        engine.update_rule,
        parallel.placement,
        master_bytes=parallel.options.master_dtype.itemsize,
        param_groups=parallel.offload.group_names,
    )


def _host_gradient_bytes(engine: Engine) -> dict[str, int]:
    """Bytes per element of each group's gradient buffer on the host; 0 where it has none."""
    groups = engine.parallel.sharded_model.param_groups
    buffers = {group.spec.name: group.offloaded.grads.buffer for group in groups if group.offloaded is not None}
    return {name: 0 if buffer is None else buffer.itemsize for name, buffer in buffers.items()}


def offloaded_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of states that this rank holds on its host and on disk."""
    parallel, options = engine.parallel, engine.parallel.options
    host = parallel.offload.host
    away = [group for group in parallel.placement.param_groups if group.name in parallel.offload.group_names]
    numel = sum(group.shard_numel for group in away if group.trainable)
    return offload_cost.off_device_bytes(
        away,
        with_params=host is not None and host.paged,
        disk=host is not None and host.disk is not None,
        compute_bytes=options.compute_dtype.itemsize,
        master_bytes=options.master_dtype.itemsize,
        state_bytes=_offloaded_state_bytes(engine) / max(1, numel),
        host_gradient_bytes={
            group.spec.name: group.grad_dtype.itemsize if group.reduction.sends_early else 0
            for group in parallel.sharded_model.param_groups
        },
    )
