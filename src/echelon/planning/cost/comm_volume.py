"""Messages of tensor parallelism, of parameters and of gradients, by the strategies' own cost functions.

Those of context parallelism are in context.py, those to experts in experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster import link_time
from echelon.planning.cost.activation_memory import partitions_inputs
from echelon.planning.cost.param_group_traffic import data_parallel_ranks, gathered_numel, param_groups, sharding_policy
from echelon.planning.cost.recompute_cost import FULL_LAYER_POLICIES, recomputed_layers
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, MatmulShape
from echelon.planning.scenario import Scenario


def tp_collectives(scenario: Scenario) -> list[Collective]:
    """Of one microbatch through all layers, over tp, from the strategies' own cost functions."""
    layout, shape = scenario.layout, scenario.shape
    once = replace(layout, accumulate=1)  # what cost functions say of a step is then of a microbatch
    size = scenario.element_bytes
    traffic = tp_cost.TransformerSizes(
        layers=shape.num_layers,
        width=shape.width,
        batch=layout.microbatch,
        seq_len=max(1, scenario.seq_len // layout.cp),
        dropout=shape.dropout,
        element_bytes=size,
        loss_bytes=4,
        attention_input_width=shape.attention.latent_width if shape.attention else 0,
        moe_layers=shape.num_moe_layers,
        has_shared_expert=any(layer.has_shared_expert for layer, _ in shape.layers),
    )
    if layout.tp_kind != "1d":
        return list(_grid_collectives(scenario, traffic))
    return list(tp_cost.collectives(traffic, once, recomputed_layers(scenario), partition=partitions_inputs(scenario)))


def _grid_collectives(scenario: Scenario, traffic: tp_cost.TransformerSizes) -> Iterator[Collective]:
    """Of one microbatch over a grid of tp; layers of 2.5d share out among microbatches what they sum once a step."""
    layout, shape = scenario.layout, scenario.shape
    again = int(layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES)
    norm: tp_grid_cost.ModuleSizes = tp_grid_cost.NormSizes(reduced=1, gathered=0)
    kinds = [
        ([(part, 0) for part in (norm, *tp_grid_cost.embedding_and_head_sizes(layout, shape.vocab, shape.width))], 1)
    ]
    for layer, n in shape.layers:
        kinds.append(([(part, again) for part in (norm, norm, *_grid_matmuls(layer.matmuls, layout))], n))
    for found, n in kinds:
        for item in tp_grid_cost.collectives(
            found,
            replace(layout, accumulate=1),
            batch=traffic.batch,
            seq_len=traffic.seq_len,
            element_bytes=traffic.element_bytes,
            loss_bytes=traffic.loss_bytes,
        ):
            yield replace(item, count=item.count * n)
    if layout.depth > 1:
        weights = sum(unit.shard_numel * n for unit, n in param_groups(scenario, 0)) * scenario.reduce_bytes
        yield Collective(op="all_reduce", axis="z", bytes=int(weights / layout.accumulate), purpose="copied weights")


def _grid_matmuls(gemms: Sequence[MatmulShape], layout: Layout) -> Iterator[tp_grid_cost.ModuleSizes]:
    """Products by columns that come one after another (q, k, v; gate, up) read the same input."""
    before = ""
    for p in gemms:
        follows = p.split == before == COLUMN_PARALLEL
        yield tp_grid_cost.linear_sizes(
            layout, p.inputs, p.outputs, leaves_region=p.split == ROW_PARALLEL, shares_input=follows
        )
        before = p.split


def tp_wire_bytes(collectives: Iterable[Collective], layout: Layout) -> float:
    """Bytes that pass a rank's link, over all axes of tp."""
    if layout.tp_kind == "1d":
        return wire_bytes(collectives, layout.tp)
    sides = tp_grid_cost.grid_shape(layout)
    return sum(wire_bytes([item], getattr(sides, item.axis)) for item in collectives)


def wire_bytes(collectives: Iterable[Collective], ranks: int) -> float:
    """Bytes that pass a rank's link."""
    return sum(link_time.wire_bytes(item.op, item.bytes, ranks) * item.count for item in collectives)


def is_split_and_recomputed(scenario: Scenario, numel: int) -> bool:
    return (
        gathered_numel(scenario, numel) < numel and scenario.layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES
    )


def dp_wire_bytes(scenario: Scenario) -> float:
    """Bytes that a step sends over dp for parameters and gradients, by shard.py's own cost function."""
    layout, total = scenario.layout, 0.0
    policy = sharding_policy(scenario)
    for unit, n in param_groups(scenario, 0):
        replicas = data_parallel_ranks(scenario, unit.name) // unit.num_shards
        own = replace(policy, num_shards=unit.num_shards, num_replicas=replicas)
        issued = dp_cost.collectives(
            [unit],
            own,
            accumulate=layout.accumulate,
            compute_bytes=scenario.element_bytes,
            reduce_bytes=scenario.reduce_bytes,
            stage_uses={unit.name: 1},
            # A layer that memory.buffer has cut is gathered module by module when it is repeated, and once more after.
            recomputed={unit.name} if is_split_and_recomputed(scenario, unit.num_shards * unit.shard_numel) else (),
        )
        total += n * sum(
            wire_bytes([item], replicas if item.axis == own.replica_axis else unit.num_shards) for item in issued
        )
    return total
