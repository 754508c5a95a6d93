"""Peak bytes on a rank by category, from the strategies' memory functions and the schedule.

states        parameters, master weights, gradients, optimizer state, weight versions (parallel/dp/cost.py)
activations   what backward needs of a layer and microbatch, times how many of them the schedule has in flight
working       what a layer's backward, or its recomputation, needs while it runs; keys and values of other cp ranks
logits        on the last stage: the head's output and its gradients
buffers       prefetched parameters, gradients that are being reduced
reserve       the device's context, its communication library, the allocator's slack

[Note: the peak]

Other programs, and Echelon on a CPU, allocate every gradient buffer throughout. Echelon on a GPU allocates those of a
parameter group when its gradients arrive, until they are used (param_group.py). So in a step of one microbatch the peak
is at one of these points:

    point                gradients                        activations    besides
    at the head          none                             all            logits, gradients of the head and of its input
    at the last layer    the head's, the last layer's     all            what a layer's backward needs
    at the first layer   all but the embedding's          one layer's    the same
    at the embedding     all                              none           the embedding's once more, before its reduction

With several microbatches or stages, gradients of earlier ones are allocated at all of them. An update on the device of
states that are on the host is one more point: all gradients, no activations, and three pages of states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.layout.placement import ParamGroupSpec
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import offloads_optimizer, resident_bytes
from echelon.pipeline.schedules import weight_versions
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.activation_memory import layer_input_bytes, layers_in_flight, saved_tensor_bytes
from echelon.planning.cost.cp_traffic import cp_working_bytes
from echelon.planning.cost.optimizer_update import (
    live_gradient_bytes,
    optimizer_state_bytes,
    paged_group_bytes,
    updates_in_backward,
)
from echelon.planning.cost.param_group_traffic import (
    OUTSIDE_GROUP,
    dense_parameters,
    gathered_numel,
    group_state_bytes,
    param_groups,
)
from echelon.planning.cost.program_memory import program_gradient_bytes, program_memory, shards_states
from echelon.planning.cost.recompute_cost import RecomputePlan, microbatch_saved_bytes, recompute_plan, recomputed_bytes
from echelon.planning.cost.working_memory import backward_bytes, lm_head_bytes
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

ByCategory = Mapping[str, float]
"""bytes by category"""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    stage: int
    """of the pipeline"""
    parts: dict[str, int]
    """bytes by category"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak_memory(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> RankMemory:
    """The memory of the fullest rank."""
    stages = (stage_memory(scenario, stage, c) for stage in stages_to_check(scenario))
    return max(stages, key=lambda memory: memory.total)


def fits(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> bool:
    return all(stage_memory(scenario, stage, c).total <= scenario.cluster.memory for stage in stages_to_check(scenario))


def stages_to_check(scenario: Scenario) -> list[int]:
    """The first, second and last stage: no other needs more."""
    return sorted({0, min(1, scenario.layout.pp - 1), scenario.layout.pp - 1})


def stage_memory(scenario: Scenario, stage: int, c: Constants = FITTED_CONSTANTS) -> RankMemory:
    """The memory of a rank of one stage, after offload."""
    candidates = _peak_candidates(scenario, stage, c)
    parts = _peak(candidates)
    if scenario.layout.offload != "none":
        share = _offload_share(scenario, stage, candidates)
        resident = _peak_after_offload(scenario, stage, candidates, share)
        offloaded = share * _host_bytes(scenario, stage, candidates[0]["optimizer"])
        offloaded += max(0, parts.get("activations", 0) - resident.get("activations", 0))
        host_memory = scenario.cluster.host_memory / min(scenario.cluster.per_node, HOST_DEVICES)
        parts = {**resident, "beyond the host": max(0, int(offloaded - host_memory))}
    return RankMemory(stage=stage, parts={name: size for name, size in parts.items() if size})


def offloaded_share(scenario: Scenario, stage: int = 0, c: Constants = FITTED_CONSTANTS) -> float:
    """Share of the optimizer state on the host."""
    return _offload_share(scenario, stage, _peak_candidates(scenario, stage, c))


def _offload_share(scenario: Scenario, stage: int, candidates: Sequence[ByCategory]) -> float:
    """`memory.host` if the user sets it; otherwise as little as makes the rank fit."""
    if not offloads_optimizer(scenario.layout.offload):
        return 0.0
    if scenario.host_share is not None:
        return scenario.host_share
    if not scenario.on_gpu:
        return 1.0
    peaks = (_peak_after_offload(scenario, stage, candidates, share) for share in (0.0, 1.0))
    resident, offloaded = (sum(peak.values()) for peak in peaks)
    needed = (resident - scenario.cluster.memory) / max(1, resident - offloaded)
    return min(1.0, math.ceil(max(0.0, needed) * 1000) / 1000)


def _host_bytes(scenario: Scenario, stage: int, optimizer_bytes: float) -> float:
    """Bytes on the host if all states are offloaded: full master weights, moments, and gradients that arrive early."""
    groups, offload = param_groups(scenario, stage), scenario.layout.offload
    if not offloads_optimizer(offload):
        return 0.0
    with_params = offload_cost.offloads_params(offload)
    late = with_params or scenario.sharding_policy.accumulates_grads
    numel = sum(n * group.shard_numel for group, n in groups if group.trainable)
    groups = [(group, n) for group, n in groups if group.trainable or with_params]
    total = 0.0
    for group, n in groups:
        off_device = offload_cost.off_device_bytes(
            [group],
            with_params=with_params,
            disk="disk" in offload.split("+"),
            compute_bytes=scenario.element_bytes,
            master_bytes=scenario.master_bytes,
            state_bytes=optimizer_bytes / numel,
            host_gradient_bytes={group.name: 0 if late else scenario.element_bytes},
        )
        total += n * off_device["host"]
    return total


def _peak_after_offload(
    scenario: Scenario, stage: int, candidates: Sequence[ByCategory], share: float
) -> dict[str, int]:
    sizes = {group.module: n * group.shard_numel for group, n in param_groups(scenario, stage) if group.trainable}
    outside_share = sizes.get(OUTSIDE_GROUP, 0) / max(1, sum(sizes.values()))
    if paged := paged_group_bytes(scenario, stage):
        # The update comes after backward: no activations, but pages of states (optim/paged_optimizer.py).
        working = min(offload_cost.pages_on_device(paged), share * sum(paged))
        gradients = max(candidate["gradients"] for candidate in candidates)
        empty = dict.fromkeys(("activations", "logits"), 0.0)
        candidates = [*candidates, {**candidates[0], **empty, "gradients": gradients, "working": working}]
    return _peak(
        resident_bytes(
            scenario.layout.offload,
            candidate,
            layers=layers_in_flight(scenario, stage),
            outside_share=outside_share,
            offloaded_share=share,
            final=not scenario.sharding_policy.accumulates_grads,
        )
        for candidate in candidates
    )


def _peak(candidates: Iterable[ByCategory]) -> dict[str, int]:
    return {name: int(size) for name, size in max(candidates, key=lambda one: sum(one.values())).items()}


def _peak_candidates(scenario: Scenario, stage: int, c: Constants) -> list[ByCategory]:
    """All bytes at each point that may be the peak: see [Note: the peak]."""
    persistent = state_bytes_by_category(scenario, stage)
    gradients = persistent.pop("gradients")
    persistent["parameters"] += _low_precision_weights(scenario)
    context_gib = c.context_gib if scenario.is_own else program_memory(scenario, c).context_gib or c.context_gib
    persistent |= {"buffers": int(_comm_buffer_bytes(scenario, stage)), "reserve": int(context_gib * GIB)}
    if updates_in_backward(scenario):
        gradients = min(gradients, live_gradient_bytes(scenario))
    return [persistent | point for point in _transient_bytes(scenario, stage, gradients, c)]


def _transient_bytes(scenario: Scenario, stage: int, gradients: float, c: Constants) -> Iterator[dict[str, float]]:
    """Yield what comes and goes, at each point that may be the peak."""
    layout, shape, recompute = scenario.layout, scenario.shape, recompute_plan(scenario)
    lazy = scenario.is_own and scenario.on_gpu
    resident = not lazy or layout.accumulate * layout.pp > 1
    # Saved activations of all microbatches in flight.
    activations = layers_in_flight(scenario, stage) * (microbatch_saved_bytes(scenario) / shape.num_layers)
    activations *= 1 if scenario.has_layer_counts else 1 + program_memory(scenario, c).activation_slack
    logits = lm_head_bytes(scenario, resident, c) if stage == layout.pp - 1 else 0.0
    working = max(_working_bytes(scenario, layer, recompute, c, resident) for layer, _ in shape.layers)
    if not lazy:
        # The head frees its logits before a layer's backward begins: the larger of the two counts.
        beyond = max(0.0, int(working) - int(logits))
        yield {"gradients": gradients, "activations": activations, "logits": logits, "working": beyond}
        return
    yield {"gradients": gradients if resident else 0, "activations": activations, "logits": logits}
    if scenario.lora_rank:  # gradients are small, and their order in time with them
        yield {"gradients": gradients, "activations": activations, "working": working}
        return
    head_and_last_layer = shape.head_parameters / layout.tp + dense_parameters(shape.layers[-1][0], layout)
    first = gradients if resident else min(gradients, head_and_last_layer * scenario.gradient_bytes)
    yield {"gradients": first, "activations": activations, "working": working}
    embedding = shape.embedding_parameters / layout.tp if stage == 0 else 0.0
    last = 0.0 if resident or shape.tied else min(gradients, embedding * scenario.gradient_bytes)
    one_layer = activations / max(1.0, layers_in_flight(scenario, stage))
    yield {"gradients": gradients - last, "activations": one_layer, "working": working}
    embedding_bytes = embedding * scenario.element_bytes
    yield {"gradients": gradients, "activations": layer_input_bytes(scenario), "working": embedding_bytes}


def state_bytes_by_category(scenario: Scenario, stage: int) -> dict[str, int]:
    """States of a rank between steps, and all gradients, by the cost function of ZeRO."""
    total: dict[str, float] = {}
    for group, n in param_groups(scenario, stage):
        versions, float16 = weight_versions(scenario.layout)[stage], scenario.precision == "fp16"
        for name, size in group_state_bytes(scenario, group, num_versions=versions, float16=float16).items():
            total[name] = total.get(name, 0) + n * size
    if not scenario.is_own:
        total["gradients"] *= program_gradient_bytes(scenario) / scenario.gradient_bytes
        if shards_states(scenario) and not scenario.layout.zero:
            for name in ("master", "optimizer"):
                total[name] /= scenario.layout.dp * scenario.layout.cp
    if scenario.optimizer is not None:
        total["optimizer"] = optimizer_state_bytes(scenario, scenario.optimizer, stage)
    return {name: int(size) for name, size in total.items()}


def _low_precision_weights(scenario: Scenario) -> int:
    """Bytes of the layers' fp8 weights, with a transposed copy, that several microbatches share."""
    layout = scenario.layout
    if not (scenario.has_kernels and scenario.is_low_precision and layout.accumulate > 1 and layout.zero < 3):
        return 0
    params = sum(n * dense_parameters(layer, layout) for layer, n in scenario.shape.layers)
    return int(2 * scenario.max_layer_share * params)


def _working_bytes(
    scenario: Scenario, layer: LayerShape, recompute: RecomputePlan, c: Constants, gradients_resident: bool
) -> float:
    """Bytes that a layer's backward needs while it runs, recomputed activations included."""
    if scenario.has_layer_counts:
        working = backward_bytes(scenario, layer, gradients_resident=gradients_resident)
    else:
        working = program_memory(scenario, c).backward_working * saved_tensor_bytes(scenario, layer)
    working += recomputed_bytes(scenario, layer, recompute)
    return working + (cp_working_bytes(scenario) if layer.attention else 0.0)


def _comm_buffer_bytes(scenario: Scenario, stage: int) -> float:
    """Unsharded parameters under zero 3, and unsharded gradients under zero 2 and 3, at their most.

    Parameters of a layer in use and of the next one; gradients of a layer that is in backward and of the one that is
    being reduced; both of what is outside the layers, throughout. A pipeline reduces the gradients of a stage together,
    while the next microbatch writes new ones.
    """
    policy = scenario.sharding_policy
    if not policy.reduce_scatter_every_microbatch:
        return 0.0
    groups = [(group, n, group.num_shards * group.shard_numel) for group, n in param_groups(scenario, stage)]

    def in_use(some: Sequence[tuple[ParamGroupSpec, float, int]]) -> float:
        outside = sum(numel for group, _, numel in some if group.module == OUTSIDE_GROUP)
        layers = [gathered_numel(scenario, numel) for group, _, numel in some if group.module != OUTSIDE_GROUP]
        return float(outside + 2 * max(layers))

    outside = sum(numel for group, _, numel in groups if group.module == OUTSIDE_GROUP)
    trained = [item for item in groups if item[0].trainable]
    gathered = groups if policy.reshards_params else trained
    params, gradients = in_use(gathered), in_use(trained)
    if not scenario.is_own and program_memory(scenario, FITTED_CONSTANTS).gathers_single_gemms:
        params = gradients = 2.0 * max(_largest_gemm(scenario), outside / 2)
    if scenario.layout.pp > 1:
        gradients = min(2, scenario.layout.accumulate) * sum(n * numel for _, n, numel in trained)
    return gradients * scenario.reduce_bytes + (params * scenario.element_bytes if policy.reshards_params else 0)


def _largest_gemm(scenario: Scenario) -> float:
    """Parameters of the largest GEMM of a layer on a tp rank."""
    gemms = (matmul for layer, _ in scenario.shape.layers for matmul in layer.matmuls)
    return max(matmul.inputs * outputs for matmul in gemms for outputs in matmul.fused_outputs or (matmul.outputs,)) / (
        scenario.layout.tp
    )
