"""Messages of tensor parallelism, of parameters and of gradients, by the strategies' own cost functions.

Those of context parallelism are in context.py, those to experts in experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.dp import zero
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster.link_time import on_the_wire
from echelon.planning.cost.activation_memory import divides
from echelon.planning.cost.param_group_traffic import data_ranks, largest_unit, policy_of, units_of
from echelon.planning.cost.recompute_cost import SEGMENTS, again_of
from echelon.planning.model.model_shape import COLUMNS, ROWS, Product
from echelon.planning.scenario import Case


def messages(case: Case) -> list[Collective]:
    """Of one microbatch through all layers, over tp, from the strategies' own cost functions."""
    layout, shape = case.layout, case.shape
    once = replace(layout, accumulate=1)  # what cost functions say of a step is then of a microbatch
    size = case.element_bytes
    traffic = tensor_parallel.Traffic(
        layers=shape.num_layers,
        width=shape.width,
        batch=layout.microbatch,
        seq_len=max(1, case.seq_len // layout.cp),
        dropout=shape.dropout,
        element_bytes=size,
        loss_bytes=4,
        narrow=shape.attention.narrow if shape.attention else 0,
        mixtures=shape.mixtures,
        shared=any(layer.has_shared for layer, _ in shape.layers),
    )
    if layout.tp_kind != "1d":
        return list(_grid_messages(case, traffic))
    return list(tensor_parallel.collectives(traffic, once, again_of(case), partition=divides(case)))


def _grid_messages(case: Case, traffic: tensor_parallel.Traffic) -> Iterator[Collective]:
    """Of one microbatch over a grid of tp; layers of 2.5d share out among microbatches what they sum once a step."""
    layout, shape = case.layout, case.shape
    again = int(layout.recompute.partition(":")[0] in SEGMENTS)
    norm: tp_grid_cost.Part = tp_grid_cost.Norm(sums=1, gathers=0)
    kinds = [([(part, 0) for part in (norm, *tp_grid_cost.ends(layout, shape.vocab, shape.width))], 1)]
    for layer, n in shape.layers:
        kinds.append(([(part, again) for part in (norm, norm, *_grid_products(layer.products, layout))], n))
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
        weights = sum(unit.shard_numel * n for unit, n in units_of(case, 0)) * case.reduce_bytes
        yield Collective(kind="all_reduce", axis="z", bytes=int(weights / layout.accumulate), part="copied weights")


def _grid_products(products: Sequence[Product], layout: Layout) -> Iterator[tp_grid_cost.Part]:
    """Products by columns that come one after another (q, k, v; gate, up) read the same input."""
    before = ""
    for p in products:
        follows = p.split == before == COLUMNS
        yield tp_grid_cost.product(layout, p.inputs, p.outputs, leaves=p.split == ROWS, follows=follows)
        before = p.split


def tensor_wire(collectives: Iterable[Collective], layout: Layout) -> float:
    """Bytes that pass a rank's link, over all axes of tp."""
    if layout.tp_kind == "1d":
        return wire(collectives, layout.tp)
    sides = tp_grid_cost.grid_of(layout)
    return sum(wire([item], getattr(sides, item.axis)) for item in collectives)


def wire(collectives: Iterable[Collective], ranks: int) -> float:
    """Bytes that pass a rank's link."""
    return sum(on_the_wire(item.kind, item.bytes, ranks) * item.count for item in collectives)


def cut_and_repeated(case: Case, numel: int) -> bool:
    return largest_unit(case, numel) < numel and case.layout.recompute.partition(":")[0] in SEGMENTS


def gradient_wire(case: Case) -> float:
    """Bytes that a step sends over dp for parameters and gradients, by shard.py's own cost function."""
    layout, total = case.layout, 0.0
    policy = policy_of(case)
    for unit, n in units_of(case, 0):
        replicas = data_ranks(case, unit.name) // unit.shards
        own = replace(policy, shards=unit.shards, replicas=replicas)
        issued = zero.collectives(
            [unit],
            own,
            accumulate=layout.accumulate,
            compute_bytes=case.element_bytes,
            reduce_bytes=case.reduce_bytes,
            stages={unit.name: 1},
            # A layer that memory.buffer has cut is gathered module by module when it is repeated, and once more after.
            repeated={unit.name} if cut_and_repeated(case, unit.shards * unit.shard_numel) else (),
        )
        total += n * sum(wire([item], replicas if item.axis == own.replica_axis else unit.shards) for item in issued)
    return total
