"""Parameter groups of a rank: their sizes, sharding policy and memory traffic."""

from __future__ import annotations

import math
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.parallel.dp import zero
from echelon.parallel.tp import cost as tp_cost
from echelon.planning.model.layer_counts import EXPERT_GRAD_COPY_BYTES, FP8_CAST_BYTES, GRAD_ACCUMULATE_BYTES
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

EXPERT_GROUP = "experts"
"""the group of an MoE layer's experts"""
OUTSIDE_GROUP = "ends"
"""the group of everything outside the layers: embedding, last norm, head"""
NUM_MOMENTS = 2
"""of AdamW"""


def param_groups(scenario: Scenario, stage: int) -> list[tuple[ParamGroupSpec, float]]:
    """List a rank's parameter groups, one for each kind of layer and one outside them, with the count of each.

    All stages count the fullest one's share of every kind of layer. The first has the embedding, the last the head.
    """
    layout, shape = scenario.layout, scenario.shape
    num_shards = zero.sharding_policy(layout).num_shards
    groups: list[tuple[ParamGroupSpec, float]] = []
    for layer, n in shape.layers:
        count = n * max_layer_share(scenario)
        groups.append((param_group(layer.name, dense_parameters(layer, layout), num_shards), count))
        if layer.is_moe:
            experts = math.ceil(layer.expert_parameters / (layout.ep * layout.etp))
            expert_shards = data_parallel_ranks(scenario, EXPERT_GROUP) if layout.zero else 1
            groups.append((param_group(EXPERT_GROUP, experts, expert_shards), count))
    outside = 0
    if stage == 0:
        outside += shape.embedding_parameters
    if stage == layout.pp - 1:
        outside += shape.other_parameters + (0 if shape.tied and layout.pp == 1 else shape.head_parameters)
    if outside:
        numel = math.ceil(outside / tp_cost.num_weight_shards(layout))
        groups.append((param_group(OUTSIDE_GROUP, numel, num_shards), 1))
    return groups


def max_layer_share(scenario: Scenario) -> float:
    """Share of the layers on the rank that has the most."""
    stages, layers = scenario.layout.pp * scenario.layout.vpp, scenario.shape.num_layers
    return math.ceil(layers / stages) * scenario.layout.vpp / layers


def dense_parameters(layer: LayerShape, layout: Layout) -> int:
    """Parameters of a layer on one tp rank, without its experts."""
    ranks = tp_cost.num_weight_shards(layout)
    _, vectors = tp_cost.local_activation_shape(layout, 1, layer.other_parameters)
    return vectors + sum(-(-count // ranks) if is_split else count for count, is_split in layer.dense_matmuls)


def param_group(name: str, numel: int, num_shards: int) -> ParamGroupSpec:
    return ParamGroupSpec(
        name=name, params=(LogicalParam(name=name, names=(name,), shape=(numel,)),), num_shards=num_shards
    )


def gathered_numel(scenario: Scenario, numel: int) -> int:
    """Elements of a group that are gathered or reduced at once: `memory.buffer` splits it, down to single modules."""
    limit = scenario.memory_options.buffer // scenario.element_bytes
    if not limit or numel <= limit:
        return numel
    ranks = tp_cost.num_weight_shards(scenario.layout)
    modules = [
        outputs * matmul.inputs // ranks
        for layer, _ in scenario.shape.layers
        for matmul in layer.matmuls
        for outputs in matmul.fused_outputs or (matmul.outputs,)
    ]
    return min(numel, max(limit, *modules))


def data_parallel_ranks(scenario: Scenario, group: str) -> int:
    """Ranks that hold the same parameters of a group, or shards of them."""
    layout = scenario.layout
    ranks = layout.dp * layout.cp
    return max(1, ranks * layout.tp // (layout.ep * layout.etp)) if group == EXPERT_GROUP else ranks


# -- states and traffic -----------------------------------------------------------------------------------------------


def sharding_policy(scenario: Scenario) -> zero.ShardingPolicy:
    """The ZeRO policy of the layout; other programs keep all states unsplit."""
    policy = zero.sharding_policy(scenario.layout, user_loop=scenario.program == "others")
    # Each tp rank has a part of the norms' gradients (sequence_parallel.py, grid_parallel.py).
    if scenario.layout.tp > 1 and (scenario.layout.sp or scenario.layout.tp_kind != "1d"):
        return replace(policy, accumulates_grads=True)
    return policy


def gradient_bytes(scenario: Scenario) -> int:
    """Bytes per element of a gradient in its buffer."""
    return scenario.reduce_bytes if sharding_policy(scenario).accumulates_grads else scenario.element_bytes


def adamw_traffic(scenario: Scenario) -> float:
    """Bytes that Echelon's AdamW moves per parameter: it reads and writes master weight and moments, and reads the
    gradient twice, once for the norm. 0 for other programs."""
    if not scenario.has_kernels:
        return 0.0
    return 2 * (scenario.master_bytes + NUM_MOMENTS * scenario.moment_bytes) + 2 * gradient_bytes(scenario)


def weight_traffic(scenario: Scenario) -> float:
    """Bytes that Echelon's kernels move for the layers' weights in a microbatch, besides GEMMs and the update.

    Weights are cast to fp8 once a step, which is shared by its microbatches.
    """
    if not scenario.has_kernels:
        return 0.0
    layout, layers = scenario.layout, scenario.shape.layers
    accumulate = GRAD_ACCUMULATE_BYTES if gradient_bytes(scenario) > scenario.element_bytes else 0.0
    cast = FP8_CAST_BYTES / layout.accumulate if scenario.is_low_precision else 0.0
    dense = sum(n * dense_parameters(layer, layout) for layer, n in layers)
    experts = sum(n * layer.expert_parameters for layer, n in layers) / (layout.ep * layout.etp)
    return (accumulate + cast) * dense + (accumulate or EXPERT_GRAD_COPY_BYTES) * experts
