"""The parameters of a rank: its flat units, how their states are kept, and what moves them through its memory."""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.parallel.dp import zero
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.model.layer_counts import EXPERT_GRAD_COPY_BYTES, FP8_CAST_BYTES, GRAD_ACCUMULATE_BYTES
from echelon.planning.model.model_shape import LayerShape, MatmulShape
from echelon.planning.scenario import Scenario

EXPERT_GROUP = "experts"
"""the unit of a mixture layer's experts"""
NUM_MOMENTS = 2


def param_groups(scenario: Scenario, stage: int) -> list[tuple[ParamGroupSpec, float]]:
    """The flat units of a rank, with how many there are of each: a unit for each kind of layer, and the rest.

    Stages have the fullest one's share of every kind of layer. Stage 0 has the embedding, the last the head; with one
    stage, both.
    """
    layout, shape = scenario.layout, scenario.shape
    shards = zero.sharding_policy(layout).num_shards
    found: list[tuple[ParamGroupSpec, float]] = []
    for layer, n in shape.layers:
        mine = n * max_layer_share(scenario)
        own = dense_parameters(layer, layout)
        found.append((_param_group(layer.name, own, shards), mine))
        if layer.is_moe:
            experts = math.ceil(layer.expert_parameters / (layout.ep * layout.etp))
            found.append(
                (
                    _param_group(
                        EXPERT_GROUP, experts, data_parallel_ranks(scenario, EXPERT_GROUP) if layout.zero else 1
                    ),
                    mine,
                )
            )
    ends = 0
    if stage == 0:
        ends += shape.embedding_parameters
    if stage == layout.pp - 1:
        ends += shape.other_parameters + (0 if shape.tied and layout.pp == 1 else shape.head_parameters)
    if ends:
        found.append((_param_group("ends", math.ceil(ends / tp_grid_cost.num_weight_shards(layout)), shards), 1))
    return found


def max_layer_share(scenario: Scenario) -> float:
    """Of the layers, on the rank that has the most of them."""
    stages, layers = scenario.layout.pp * scenario.layout.vpp, scenario.shape.num_layers
    return math.ceil(layers / stages) * scenario.layout.vpp / layers


def dense_parameters(layer: LayerShape, layout: Layout) -> int:
    """Of a layer on one rank of tp, without its experts."""
    ranks, others = (
        tp_grid_cost.num_weight_shards(layout),
        tp_grid_cost.local_activation_shape(layout, 1, layer.other_parameters)[1],
    )
    return others + sum(-(-count // ranks) if divided else count for count, divided in layer.dense_matmuls)


def _param_group(name: str, numel: int, shards: int) -> ParamGroupSpec:
    return ParamGroupSpec(
        name=name, params=(LogicalParam(name=name, names=(name,), shape=(numel,)),), num_shards=shards
    )


def gathered_numel(scenario: Scenario, numel: int) -> int:
    """Elements that are gathered or reduced at once of a unit of so many: `memory.buffer` cuts it, down to a module."""
    limit = scenario.memory_options.buffer // scenario.element_bytes
    if not limit or numel <= limit:
        return numel
    ranks = tp_grid_cost.num_weight_shards(scenario.layout)
    modules = [
        side * p.inputs // ranks
        for layer, _ in scenario.shape.layers
        for p in layer.matmuls
        for side in _fused_outputs(p)
    ]
    return min(numel, max(limit, *modules))


def _fused_outputs(product: MatmulShape) -> tuple[int, ...]:
    return product.fused_outputs or (product.outputs,)


def data_parallel_ranks(scenario: Scenario, group: str) -> int:
    """Ranks that hold the same parameters of a unit, or shards of them."""
    layout = scenario.layout
    data = layout.dp * layout.cp
    return max(1, data * layout.tp // (layout.ep * layout.etp)) if group == EXPERT_GROUP else data


# -- states -----------------------------------------------------------------------------------------------------------


def sharding_policy(scenario: Scenario) -> zero.ShardingPolicy:
    """When units move, and in which types their states are kept: other programs keep all of them in whole."""
    found = zero.sharding_policy(scenario.layout, user_loop=scenario.program == "others")
    # Norms have a part of their gradients on each rank of tp (sequence.py, grid.py).
    if scenario.layout.tp > 1 and (scenario.layout.sp or scenario.layout.tp_kind != "1d"):
        return replace(found, accumulates_grads=True)
    return found


def gradient_bytes(scenario: Scenario) -> int:
    """Of an element of a gradient, where it is kept."""
    return scenario.reduce_bytes if sharding_policy(scenario).accumulates_grads else scenario.element_bytes


def adamw_traffic(scenario: Scenario) -> float:
    """Moved per parameter by our update: master and moments are read and written, gradients read for their norm too."""
    if not scenario.has_kernels:
        return 0.0
    return 2 * (scenario.master_bytes + NUM_MOMENTS * scenario.moment_bytes) + 2 * gradient_bytes(scenario)


def weight_traffic(scenario: Scenario) -> float:
    """Moved for the layers' weights in a microbatch, beside products and the update, where our kernels run.

    Weights are in 8 bits once a step, where several microbatches keep them, and in each microbatch otherwise.
    """
    if not scenario.has_kernels:
        return 0.0
    layout, layers = scenario.layout, scenario.shape.layers
    sums = GRAD_ACCUMULATE_BYTES if gradient_bytes(scenario) > scenario.element_bytes else 0.0
    each = sums + (FP8_CAST_BYTES / layout.accumulate if scenario.is_low_precision else 0.0)
    experts = sum(n * layer.expert_parameters for layer, n in layers) / (layout.ep * layout.etp)
    return (
        each * sum(n * dense_parameters(layer, layout) for layer, n in layers)
        + (sums or EXPERT_GRAD_COPY_BYTES) * experts
    )
