"""What one step of an engine issues and moves on a rank: the cost functions of all its strategies, put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.layout.collective import Collective
from echelon.memory.checkpointing.cost import Again
from echelon.memory.offload import cost as offload_cost
from echelon.models.pipeline_model import inside
from echelon.moe.moe_layer import Mixture
from echelon.parallel.cp import cost as cp_cost
from echelon.parallel.dp import sync_batchnorm, zero
from echelon.parallel.ep import cost as ep_cost
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.tp_grid import grid_parallel

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def collectives(engine: Engine, traffic: tensor_parallel.Traffic | None) -> list[Collective]:
    """See `Engine.collectives`."""
    layout, pipeline, parallel = engine.layout, engine.pipeline, engine.parallel
    slices = pipeline.slices(traffic) if pipeline is not None and traffic is not None else ()
    found: list[Collective] = []
    if traffic is not None:
        mine = traffic if pipeline is None else replace(pipeline.share(traffic), mixtures=len(_mixtures(engine)))
        found += _of_experts(engine, mine)
        again = _again(engine)
        if parallel.context is not None:
            found += cp_cost.of_traffic(mine, layout, parallel.context.outer.index, again)
            mine = replace(mine, seq_len=cp_cost.slice_length(layout, mine.seq_len))
        for length in slices or (mine.seq_len,):
            sized = replace(mine, seq_len=length)
            if layout.tp_kind == "1d":
                found += tensor_parallel.collectives(sized, layout, again, partition=parallel.options.partition)
            else:
                found += grid_parallel.collectives(engine.model, _repeated(engine), sized, layout)
        found += pipeline.messages(mine) if pipeline is not None else []
    for name, channels in sync_batchnorm.channels_of(engine.model).items():
        found += sync_batchnorm.collectives(
            [channels],
            accumulate=layout.accumulate,
            element_bytes=max(parallel.options.compute.itemsize, 4),
            repeated=_is_repeated(engine, name),
        )
    updates = pipeline.updates if pipeline is not None else 1
    once = _of_an_update(engine, layout.accumulate * max(len(slices), 1) // updates)
    found += [replace(item, count=item.count * updates) for item in once]
    found += pipeline.news() if pipeline is not None else []
    if parallel.axes[engine.loss_axis].size > 1:
        size = 24 if pipeline is not None and pipeline.asynchronous else 16
        found.append(Collective(kind="all_reduce", axis=engine.loss_axis, bytes=size, part="loss and count"))
    return [*found, *engine.loads.collectives()]


def _repeated(engine: Engine) -> list[str]:
    """Layers whose forward is repeated."""
    return [name for name, form in engine.parallel.recomputed.forms.items() if form == "full"]


def _is_repeated(engine: Engine, name: str) -> bool:
    return any(inside(name, layer) for layer in _repeated(engine))


def _gathered_again(engine: Engine) -> set[str]:
    """Units inside layers that are repeated (memory.buffer, shard.units)."""
    repeated, found = _repeated(engine), set()
    names = [unit.name for unit in engine.parallel.placement.units]
    for layer in repeated:
        parts = [name for name in names if name != layer and inside(name, layer)]
        config = getattr(engine.model, "config", None)
        if layer in engine.parallel.recomputed.tails and getattr(config, "dropout", 1.0) == 0.0:
            parts = parts[:-1]  # whole when backward begins, and a repetition ends inside it
        found.update(parts)
    return found


def _again(engine: Engine) -> Again:
    found = engine.parallel.recomputed
    mixed = {layer for layer in found.forms for name in _mixtures(engine) if inside(name, layer)}
    plain = [layer for layer in _repeated(engine) if layer not in mixed]
    return Again(
        plain=len(plain),
        plain_tails=sum(layer in found.tails for layer in plain),
        mixed=len(_repeated(engine)) - len(plain),
        mixed_tails=len(found.tails & mixed),
        cores=sum("selective" in form for form in found.forms.values()),
    )


def _mixtures(engine: Engine) -> dict[str, Mixture]:
    """On this rank, by name."""
    return {name: module for name, module in engine.model.named_modules() if isinstance(module, Mixture)}


def _of_experts(engine: Engine, traffic: tensor_parallel.Traffic) -> Iterator[Collective]:
    """Of gates that drop nothing."""
    tails = engine.parallel.recomputed.tails
    for name, mixture in _mixtures(engine).items():
        routed = ep_cost.Routed(
            layers=1,
            sequences=traffic.batch,
            seq_len=traffic.seq_len,
            width=traffic.width,
            element_bytes=traffic.element_bytes,
            experts=mixture.gate.num_experts,
            k=mixture.gate.k,
            score_bytes=traffic.loss_bytes,
            scores=mixture.gate.num_scores,
            dropout=mixture.experts.drop.p > 0,
            followed=traffic.dropout or not any(inside(name, layer) for layer in tails),
        )
        yield from ep_cost.collectives(engine.layout, routed, repeated=_is_repeated(engine, name))


def _of_an_update(engine: Engine, accumulate: int) -> list[Collective]:
    """What the gradients of so many microbatches and the update they make issue."""
    parallel, pipeline = engine.parallel, engine.pipeline
    options, units = parallel.options, parallel.placement.units
    reduce_bytes = options.gradients.itemsize
    found = list(
        zero.collectives(
            units,
            parallel.policy,
            accumulate=accumulate,
            compute_bytes=options.compute.itemsize,
            reduce_bytes=reduce_bytes,
            stages=pipeline.uses if pipeline is not None else None,
            experts=zero.experts_policy(parallel.layout, parallel.policy),
            repeated=_gathered_again(engine),
            paged=[unit.name for unit in units if parallel.away.pages(unit)],
        )
    )
    for some in [[unit] for unit in units] if engine.rule.in_backward else [units]:
        found += tensor_parallel.partial_sums(some, reduce_bytes, parallel.placement.shard_of)
    if engine.norm.axis.size > 1:
        found.append(Collective(kind="all_reduce", axis=engine.norm.axis.name, bytes=8, part="norm"))
    return [*found, *engine.optimizer.collectives()]


def crossing(engine: Engine) -> dict[str, int]:
    """Bytes of gradients and parameters that a step moves between this rank's device and its host."""
    parallel, pipeline = engine.parallel, engine.pipeline
    options, units = parallel.options, engine.parallel.placement.units
    host, away = parallel.away.host, [unit for unit in units if unit.name in parallel.away.names]
    layers = [unit.name for unit in units if not unit.kept]
    return offload_cost.crossing(
        away,
        paged=host is not None and host.paged,
        accumulate=parallel.layout.accumulate,
        compute_bytes=options.compute.itemsize,
        gradient_bytes={unit.unit.name: unit.gradient_type.itemsize for unit in parallel.flat.units},
        reshard_after_forward=options.reshard_after_forward,
        last=layers[-1] if layers else "",
        stages=pipeline.uses if pipeline is not None else None,
        repeated=_gathered_again(engine),
    )


def held_away(engine: Engine) -> dict[str, int]:
    """Bytes of states that this rank holds on its host and on disk."""
    parallel, options = engine.parallel, engine.parallel.options
    host = parallel.away.host
    return offload_cost.held(
        [unit for unit in parallel.placement.units if unit.name in parallel.away.names],
        paged=host is not None and host.paged,
        disk=host is not None and host.disk is not None,
        compute_bytes=options.compute.itemsize,
        master_bytes=options.master.itemsize,
        state_bytes=options.state_bytes,
        early_bytes={
            unit.unit.name: unit.gradient_type.itemsize if unit.sends_early else 0 for unit in parallel.flat.units
        },
    )
