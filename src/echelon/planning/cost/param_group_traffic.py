"""Parameter groups of a rank: their sizes, sharding policy and memory traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from echelon.layout import Layout
from echelon.layout.placement import FROZEN_SUFFIX, LogicalParam, ParamGroupSpec
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp.zero import ShardingPolicy, expert_sharding_policy, sharding_policy
from echelon.parallel.tp import cost as tp_cost
from echelon.planning.model.layer_counts import EXPERT_GRAD_COPY_BYTES, FP8_CAST_BYTES, GRAD_ACCUMULATE_BYTES
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import NUM_MOMENTS, Scenario, lora_numel

EXPERT_GROUP = "experts"
"""the group of an MoE layer's experts"""
OUTSIDE_GROUP = "ends"
"""the group of everything outside the layers: embedding, last norm, head"""


def param_groups(scenario: Scenario, stage: int) -> list[tuple[ParamGroupSpec, float]]:
    """List a rank's parameter groups, one for each kind of layer and one outside them, with the count of each.

    All stages count the fullest one's share of every kind of layer. The first has the embedding, the last the head.
    With LoRA these groups are frozen, and each layer has one of adapters.
    """
    groups = _base_groups(scenario, stage)
    if not scenario.lora_rank:
        return groups
    return [(frozen_group(scenario, group), n) for group, n in groups] + list(_adapter_groups(scenario))


def _adapter_groups(scenario: Scenario) -> Iterator[tuple[ParamGroupSpec, float]]:
    """The adapters of each kind of layer: tp divides one of the two factors."""
    layout = scenario.layout
    for layer, n in scenario.shape.layers:
        numel = math.ceil(lora_numel(layer, scenario) * (1 + 1 / layout.tp) / 2)
        if numel:
            yield param_group(layer.name, numel, sharding_policy(layout).num_shards), n * scenario.max_layer_share


def frozen_group(scenario: Scenario, group: ParamGroupSpec) -> ParamGroupSpec:
    """A group whose parameters are not trained."""
    (param,) = group.params
    shards = group.num_shards if scenario.layout.zero == 3 else 1
    frozen = replace(param, trainable=False)
    return ParamGroupSpec(name=group.name + FROZEN_SUFFIX, params=(frozen,), num_shards=shards)


def _base_groups(scenario: Scenario, stage: int) -> list[tuple[ParamGroupSpec, float]]:
    """The groups of the model's own weights."""
    layout, shape = scenario.layout, scenario.shape
    num_shards = sharding_policy(layout).num_shards
    groups: list[tuple[ParamGroupSpec, float]] = []
    for layer, n in shape.layers:
        count = n * scenario.max_layer_share
        groups.append((param_group(layer.name, dense_parameters(layer, layout), num_shards), count))
        if layer.is_moe:
            experts = math.ceil(layer.expert_parameters / (layout.ep * layout.etp))
            groups.append((param_group(EXPERT_GROUP, experts, layout.num_expert_shards), count))
    outside = shape.embedding_parameters if stage == 0 else 0
    if stage == layout.pp - 1:
        outside += shape.other_parameters + (0 if shape.tied and layout.pp == 1 else shape.head_parameters)
    if outside:
        numel = math.ceil(outside / tp_cost.num_weight_shards(layout))
        groups.append((param_group(OUTSIDE_GROUP, numel, num_shards), 1))
    return groups


def dense_parameters(layer: LayerShape, layout: Layout) -> int:
    """Parameters of a layer on one tp rank, without its experts."""
    ranks = tp_cost.num_weight_shards(layout)
    _, vectors = tp_cost.local_activation_shape(layout, 1, layer.other_parameters)
    return vectors + sum(-(-count // ranks) if is_split else count for count, is_split in layer.dense_matmuls)


def param_group(name: str, numel: int, num_shards: int) -> ParamGroupSpec:
    param = LogicalParam(name=name, names=(name,), shape=(numel,))
    return ParamGroupSpec(name=name, params=(param,), num_shards=num_shards)


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


def group_policy(scenario: Scenario, group: ParamGroupSpec) -> ShardingPolicy:
    """Policy of a group: experts have other copies than the rest, and where they have one it is never resharded."""
    dense = scenario.sharding_policy
    return expert_sharding_policy(scenario.layout, dense) if group.module == EXPERT_GROUP else dense


def group_state_bytes(
    scenario: Scenario, group: ParamGroupSpec, *, num_versions: int = 1, float16: bool = False
) -> dict[str, int]:
    """Bytes of a group's states and gradients on a rank by category, by the cost function of ZeRO."""
    return dp_cost.state_bytes(
        [group],
        group_policy(scenario, group),
        compute_bytes=scenario.element_bytes,
        master_bytes=scenario.master_bytes,
        moments=NUM_MOMENTS,
        moment_bytes=scenario.moment_bytes,
        reduce_bytes=scenario.reduce_bytes,
        num_versions=num_versions,
        float16=float16,
    )


def weight_traffic(scenario: Scenario) -> float:
    """Bytes that Echelon's kernels move for the layers' weights in a microbatch, besides GEMMs and the update.

    Weights are cast to fp8 once a step, which is shared by its microbatches.
    """
    if not scenario.has_kernels:
        return 0.0
    layout, layers = scenario.layout, scenario.shape.layers
    accumulate = GRAD_ACCUMULATE_BYTES if scenario.gradient_bytes > scenario.element_bytes else 0.0
    if scenario.lora_rank:
        return 0.0  # no gradients of the weights; their fp8 casts are of no weight beside the GEMMs
    cast = FP8_CAST_BYTES / layout.accumulate if scenario.is_low_precision else 0.0
    dense = sum(n * dense_parameters(layer, layout) for layer, n in layers)
    experts = sum(n * layer.expert_parameters for layer, n in layers) / (layout.ep * layout.etp)
    return (accumulate + cast) * dense + (accumulate or EXPERT_GRAD_COPY_BYTES) * experts
