"""The parameters of a rank: its flat units, how their states are kept, and what moves them through its memory."""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.placement import Entry, Unit
from echelon.parallel.dp import zero
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cost.kernel_traffic import GRADIENT_COPIES, GRADIENT_SUMS, WEIGHT_CASTS
from echelon.planning.model.model_shape import Layer, Product
from echelon.planning.scenario import Case

EXPERTS = "experts"
"""the unit of a mixture layer's experts"""
MOMENTS = 2


def units_of(case: Case, stage: int) -> list[tuple[Unit, float]]:
    """The flat units of a rank, with how many there are of each: a unit for each kind of layer, and the rest.

    Stages have the fullest one's share of every kind of layer. Stage 0 has the embedding, the last the head; with one
    stage, both.
    """
    layout, shape = case.layout, case.shape
    shards = zero.policy(layout).shards
    found: list[tuple[Unit, float]] = []
    for layer, n in shape.layers:
        mine = n * fullest_share(case)
        own = own_parameters(layer, layout)
        found.append((_unit(layer.name, own, shards), mine))
        if layer.is_mixture:
            experts = math.ceil(layer.expert_parameters / (layout.ep * layout.etp))
            found.append((_unit(EXPERTS, experts, data_ranks(case, EXPERTS) if layout.zero else 1), mine))
    ends = 0
    if stage == 0:
        ends += shape.embedding_parameters
    if stage == layout.pp - 1:
        ends += shape.other_parameters + (0 if shape.tied and layout.pp == 1 else shape.head_parameters)
    if ends:
        found.append((_unit("ends", math.ceil(ends / tp_grid_cost.weight_ranks(layout)), shards), 1))
    return found


def fullest_share(case: Case) -> float:
    """Of the layers, on the rank that has the most of them."""
    stages, layers = case.layout.pp * case.layout.vpp, case.shape.num_layers
    return math.ceil(layers / stages) * case.layout.vpp / layers


def own_parameters(layer: Layer, layout: Layout) -> int:
    """Of a layer on one rank of tp, without its experts."""
    ranks, others = tp_grid_cost.weight_ranks(layout), tp_grid_cost.block(layout, 1, layer.other_parameters)[1]
    return others + sum(-(-count // ranks) if divided else count for count, divided in layer.own_products)


def _unit(name: str, numel: int, shards: int) -> Unit:
    return Unit(name=name, entries=(Entry(name=name, names=(name,), shape=(numel,)),), shards=shards)


def largest_unit(case: Case, numel: int) -> int:
    """Elements that are gathered or reduced at once of a unit of so many: `memory.buffer` cuts it, down to a module."""
    limit = case.thrift.buffer // case.element_bytes
    if not limit or numel <= limit:
        return numel
    ranks = tp_grid_cost.weight_ranks(case.layout)
    modules = [side * p.inputs // ranks for layer, _ in case.shape.layers for p in layer.products for side in _sides(p)]
    return min(numel, max(limit, *modules))


def _sides(product: Product) -> tuple[int, ...]:
    return product.parts or (product.outputs,)


def data_ranks(case: Case, unit: str) -> int:
    """Ranks that hold the same parameters of a unit, or shards of them."""
    layout = case.layout
    data = layout.dp * layout.cp
    return max(1, data * layout.tp // (layout.ep * layout.etp)) if unit == EXPERTS else data


# -- states -----------------------------------------------------------------------------------------------------------


def policy_of(case: Case) -> zero.Policy:
    """When units move, and in which types their states are kept: other programs keep all of them in whole."""
    found = zero.policy(case.layout, own_loop=case.program == "others")
    # Norms have a part of their gradients on each rank of tp (sequence.py, grid.py).
    if case.layout.tp > 1 and (case.layout.sp or case.layout.tp_kind != "1d"):
        return replace(found, sums_gradients=True)
    return found


def gradient_bytes(case: Case) -> int:
    """Of an element of a gradient, where it is kept."""
    return case.reduce_bytes if policy_of(case).sums_gradients else case.element_bytes


def update_bytes(case: Case) -> float:
    """Moved per parameter by our update: master and moments are read and written, gradients read for their norm too."""
    if not case.has_kernels:
        return 0.0
    return 2 * (case.master_bytes + MOMENTS * case.moment_bytes) + 2 * gradient_bytes(case)


def weight_bytes(case: Case) -> float:
    """Moved for the layers' weights in a microbatch, beside products and the update, where our kernels run.

    Weights are in 8 bits once a step, where several microbatches keep them, and in each microbatch otherwise.
    """
    if not case.has_kernels:
        return 0.0
    layout, layers = case.layout, case.shape.layers
    sums = GRADIENT_SUMS if gradient_bytes(case) > case.element_bytes else 0.0
    each = sums + (WEIGHT_CASTS / layout.accumulate if case.is_narrow else 0.0)
    experts = sum(n * layer.expert_parameters for layer, n in layers) / (layout.ep * layout.etp)
    return each * sum(n * own_parameters(layer, layout) for layer, n in layers) + (sums or GRADIENT_COPIES) * experts
