"""Collectives of tensor parallelism, of parameters and of gradients, by the strategies' cost functions.

cp_traffic.py counts those of context parallelism, expert_traffic.py those of expert parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.calibrate.programs import BUCKETED, bucket_numel
from echelon.planning.cluster.link_time import collective_bytes
from echelon.planning.cost.activation_memory import partitions_inputs
from echelon.planning.cost.param_group_traffic import EXPERT_GROUP, gathered_numel, group_policy, param_groups
from echelon.planning.cost.recompute_cost import recomputed_layers
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, MatmulShape
from echelon.planning.scenario import Scenario


def tp_collectives(scenario: Scenario) -> list[Collective]:
    """List the tp collectives of one microbatch through all layers."""
    layout, shape = scenario.layout, scenario.shape
    sizes = tp_cost.TransformerSizes(
        layers=shape.num_layers,
        width=shape.width,
        batch=layout.microbatch,
        seq_len=max(1, scenario.seq_len // layout.cp),
        dropout=shape.dropout,
        element_bytes=scenario.element_bytes,
        loss_bytes=4,
        attention_input_width=shape.attention.latent_width if shape.attention else 0,
        moe_layers=shape.num_moe_layers,
        has_shared_expert=any(layer.has_shared_expert for layer, _ in shape.layers),
    )
    if layout.tp_kind != "1d":
        return list(_grid_collectives(scenario, sizes))
    one_microbatch, partition = replace(layout, accumulate=1), partitions_inputs(scenario)
    return list(tp_cost.collectives(sizes, one_microbatch, recomputed_layers(scenario), partition=partition))


def _grid_collectives(scenario: Scenario, sizes: tp_cost.TransformerSizes) -> Iterator[Collective]:
    """Yield the collectives of one microbatch over a tp grid; 2.5d reduces its copied weights once a step."""
    layout, shape, recomputed = scenario.layout, scenario.shape, int(scenario.recomputes_layers)
    norm: tp_grid_cost.ModuleSizes = tp_grid_cost.NormSizes(reduced=1, gathered=0)
    outside = (norm, *tp_grid_cost.embedding_and_head_sizes(layout, shape.vocab, shape.width))
    modules = [([(module, 0) for module in outside], 1)]
    for layer, n in shape.layers:
        inside = (norm, norm, *_grid_matmuls(layer.matmuls, layout))
        modules.append(([(module, recomputed) for module in inside], n))
    for some, n in modules:
        for item in tp_grid_cost.collectives(some, replace(layout, accumulate=1), sizes):
            yield replace(item, count=item.count * n)
    if layout.depth > 1:
        weights = sum(group.shard_numel * n for group, n in param_groups(scenario, 0)) * scenario.reduce_bytes
        yield Collective(op="all_reduce", axis="z", bytes=int(weights / layout.accumulate), purpose="copied weights")


def _grid_matmuls(matmuls: Sequence[MatmulShape], layout: Layout) -> Iterator[tp_grid_cost.ModuleSizes]:
    """Yield grid GEMMs; consecutive column-parallel ones (q, k, v; gate, up) share their input."""
    previous_split = ""
    for matmul in matmuls:
        leaves, shares = matmul.split == ROW_PARALLEL, matmul.split == previous_split == COLUMN_PARALLEL
        sizes = (matmul.inputs, matmul.outputs)
        yield tp_grid_cost.linear_sizes(layout, *sizes, leaves_region=leaves, shares_input=shares)
        previous_split = matmul.split


def tp_wire_bytes(collectives: Iterable[Collective], layout: Layout) -> float:
    """Bytes that pass a rank's link, over all axes of tp."""
    ranks = {"tp": layout.tp, **asdict(tp_cost.grid_shape(layout))}
    return sum(collective_bytes(item, ranks[item.axis]) for item in collectives)


@dataclass(kw_only=True)
class DpVolume:
    """What a step sends over one process group of dp: bytes on a rank's links, and collectives."""

    ranks: int = 1
    gathered: float = 0.0
    """of parameters"""
    reduced: float = 0.0
    """of gradients"""
    num_collectives: float = 0.0
    numel: float = 0.0
    """parameters that are reduced"""


@dataclass(frozen=True, kw_only=True)
class DpVolumes:
    """What a step sends over each process group of dp: HSDP has two, and experts have groups of their own."""

    shards: DpVolume = field(default_factory=DpVolume)
    replicas: DpVolume = field(default_factory=DpVolume)
    expert_shards: DpVolume = field(default_factory=DpVolume)
    expert_replicas: DpVolume = field(default_factory=DpVolume)


def dp_volumes(scenario: Scenario) -> DpVolumes:
    volumes = DpVolumes()
    for group, n in param_groups(scenario, 0):
        policy = group_policy(scenario, group)
        numel = group.num_shards * group.shard_numel
        is_split = scenario.recomputes_layers and gathered_numel(scenario, numel) < numel
        collectives = dp_cost.collectives(
            [group],
            policy,
            accumulate=scenario.layout.accumulate,
            compute_bytes=scenario.element_bytes,
            reduce_bytes=scenario.reduce_bytes,
            stage_uses={group.name: 1},
            # A layer that memory.buffer splits is gathered module by module for recomputation, and once more after it.
            recomputed={group.name} if is_split else (),
        )
        of_experts = group.module == EXPERT_GROUP
        shards, replicas = (
            volumes.expert_shards if of_experts else volumes.shards,
            (volumes.expert_replicas if of_experts else volumes.replicas),
        )
        if group.trainable or group.num_shards > 1:
            shards.ranks, replicas.ranks = group.num_shards, policy.num_replicas
        for item in collectives:
            volume = replicas if item.op == "all_reduce" else shards
            sent = n * collective_bytes(item, volume.ranks)
            volume.num_collectives += n * item.count
            if item.op == "all_gather":
                volume.gathered += sent
            else:
                volume.reduced += sent
                volume.numel += n * item.bytes / scenario.reduce_bytes
    if scenario.program in BUCKETED and not scenario.sharding_policy.reduce_scatter_every_microbatch:
        for volume in (volumes.shards, volumes.replicas, volumes.expert_shards, volumes.expert_replicas):
            _fill_buckets(volume)
    return volumes


def _fill_buckets(volume: DpVolume) -> None:
    """Count a reduction and, of sharded parameters, a gather of each bucket."""
    buckets = math.ceil(volume.numel / bucket_numel(volume.ranks))
    volume.num_collectives = buckets * (2 if volume.gathered else 1)
