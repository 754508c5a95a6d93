"""Bytes on a rank by category, from the strategies' own memory functions and the schedule itself.

states        shard.py's: parameters, master copies, gradients, optimizer, kept versions
activations   what backward needs of a layer and microbatch, times how many of them the schedule has in flight
working       what a layer's backward, or its recomputation, needs while it runs; slices of others under cp (context.py)
logits        on the last stage: the head's output and its gradients
buffers       parameters gathered ahead, gradients on their way
reserve       the device's context, its communication library, the allocator's slack

[Note: the fullest moment]

Other programs, and ours on a processor, have room for every gradient throughout. Ours on a GPU has a unit's gradients
from when they arrive until they are used (flat_unit.py). So where a step has one microbatch, one of these is fullest:

    moment               gradients                       activations    beside them
    at the head          none                            all            logits, gradients of the head and of its input
    at the last layer    the head's, the last layer's    all            what a layer's backward needs
    at the first layer   all but the embedding's         one layer's    the same
    at the embedding     all                             none           the embedding's once more, on its way

With several microbatches or stages, gradients of earlier ones are there at any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import offloads_optimizer, resident_bytes
from echelon.parallel.dp import cost as dp_cost
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost import backward_memory, optimizer_update
from echelon.planning.cost.activation_memory import layer_input_bytes, layers_in_flight, saved_tensor_bytes
from echelon.planning.cost.cp_traffic import cp_working_bytes
from echelon.planning.cost.lm_head_memory import lm_head_bytes
from echelon.planning.cost.param_group_traffic import (
    NUM_MOMENTS,
    dense_parameters,
    gathered_numel,
    gradient_bytes,
    max_layer_share,
    param_groups,
    sharding_policy,
)
from echelon.planning.cost.recompute_cost import RecomputePlan, recompute_plan, recomputed_bytes, saved_layer_bytes
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's bytes at its fullest."""

    stage: int
    """of the pipeline"""
    parts: dict[str, int]
    """by category"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak_memory(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> RankMemory:
    """Of the fullest rank."""
    return max(
        (stage_memory(scenario, stage, c) for stage in stages_to_check(scenario)), key=lambda memory: memory.total
    )


def fits(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> bool:
    """No rank needs more than a device has."""
    return all(stage_memory(scenario, stage, c).total <= scenario.cluster.memory for stage in stages_to_check(scenario))


def stages_to_check(scenario: Scenario) -> list[int]:
    """The first, the second and the last: others hold no more."""
    return sorted({0, min(1, scenario.layout.pp - 1), scenario.layout.pp - 1})


def stage_memory(scenario: Scenario, stage: int, c: Constants = FITTED_CONSTANTS) -> RankMemory:
    still = _persistent_bytes(scenario, stage, c)
    moments = [still | moment for moment in _peak_candidates(scenario, stage, still.pop("gradients"), c)]
    parts = _peak(moments)
    if scenario.layout.offload != "none":
        share = _offload_share(scenario, stage, moments)
        stay = _peak(_after_offload(scenario, stage, moments, share))
        away = share * _host_bytes(scenario, stage, still["optimizer"]) + max(
            0, parts.get("activations", 0) - stay.get("activations", 0)
        )
        host = scenario.cluster.host_memory / min(scenario.cluster.per_node, HOST_DEVICES)
        parts = {**stay, "beyond the host": max(0, int(away - host))}
    return RankMemory(stage=stage, parts={name: size for name, size in parts.items() if size})


def offloaded_share(scenario: Scenario, stage: int = 0, c: Constants = FITTED_CONSTANTS) -> float:
    """Of the states, those that leave the device."""
    still = _persistent_bytes(scenario, stage, c)
    moments = [still | moment for moment in _peak_candidates(scenario, stage, still.pop("gradients"), c)]
    return _offload_share(scenario, stage, moments)


def _offload_share(scenario: Scenario, stage: int, candidates: Sequence[Mapping[str, float]]) -> float:
    """As `memory.host` asks; otherwise as few as make a rank fit."""
    if not offloads_optimizer(scenario.layout.offload):
        return 0.0
    if scenario.host_share is not None:
        return scenario.host_share
    if not scenario.on_gpu:
        return 1.0
    none, every = (sum(_peak(_after_offload(scenario, stage, candidates, share)).values()) for share in (0.0, 1.0))
    needed = (none - scenario.cluster.memory) / max(1, none - every)
    return min(1.0, math.ceil(max(0.0, needed) * 1000) / 1000)


def _host_bytes(scenario: Scenario, stage: int, optimizer_bytes: float) -> float:
    """Bytes of states, and of gradients that come down: a master value is whole there, and half of one on a device."""
    units, kinds = param_groups(scenario, stage), scenario.layout.offload
    if not offloads_optimizer(kinds):
        return 0.0
    early = (
        0
        if offload_cost.offloads_params(kinds) or sharding_policy(scenario).accumulates_grads
        else scenario.element_bytes
    )
    size = sum(n * unit.shard_numel for unit, n in units)
    return sum(
        n
        * offload_cost.off_device_bytes(
            [unit],
            with_params=offload_cost.offloads_params(kinds),
            disk="disk" in kinds.split("+"),
            compute_bytes=scenario.element_bytes,
            master_bytes=scenario.master_bytes,
            state_bytes=optimizer_bytes / size,
            host_gradient_bytes={unit.name: early},
        )["host"]
        for unit, n in units
    )


def _after_offload(
    scenario: Scenario, stage: int, candidates: Sequence[Mapping[str, float]], share: float
) -> list[dict[str, int]]:
    sizes = {unit.name: n * unit.shard_numel for unit, n in param_groups(scenario, stage)}
    found = partial(
        resident_bytes,
        scenario.layout.offload,
        layers=layers_in_flight(scenario, stage),
        outside_share=sizes.get("ends", 0) / max(1, sum(sizes.values())),
        offloaded_share=share,
        final=not sharding_policy(scenario).accumulates_grads,
    )
    return [found(moment) for moment in candidates]


def _peak(candidates: Iterable[Mapping[str, float]]) -> dict[str, int]:
    return {name: int(size) for name, size in max(candidates, key=lambda moment: sum(moment.values())).items()}


def _persistent_bytes(scenario: Scenario, stage: int, c: Constants) -> dict[str, float]:
    """What does not come and go, and every gradient."""
    found = state_bytes_by_category(scenario, stage)
    found["parameters"] += _low_precision_weights(scenario)
    return {**found, "buffers": int(_comm_buffer_bytes(scenario, stage)), "reserve": int(c.context * GIB)}


def _peak_candidates(scenario: Scenario, stage: int, gradients: float, c: Constants) -> Iterator[dict[str, float]]:
    """What comes and goes, at each moment that may be the fullest: see [Note: the fullest moment]."""
    layout, done = scenario.layout, recompute_plan(scenario)
    in_turn = optimizer_update.updates_in_backward(scenario)
    gradients = min(gradients, optimizer_update.live_gradient_bytes(scenario)) if in_turn else gradients
    lazy = scenario.program != "others" and scenario.on_gpu
    held = not lazy or layout.accumulate * layout.pp > 1
    has_head = stage == layout.pp - 1
    activations = _activation_bytes(scenario, stage, done, c)
    logits = lm_head_bytes(scenario, held) if has_head else 0.0
    working = max(_working_bytes(scenario, layer, c, done, held) for layer, _ in scenario.shape.layers)
    if not lazy:
        # The head has let go of its logits before a layer's backward begins: the larger of the two counts.
        beyond = max(0.0, int(working) - int(logits))
        yield {"gradients": gradients, "activations": activations, "logits": logits, "working": beyond}
        return
    yield {"gradients": gradients if held else 0, "activations": activations, "logits": logits}
    first = gradients if held else min(gradients, _first_gradient_bytes(scenario))
    yield {"gradients": first, "activations": activations, "working": working}
    embedding = scenario.shape.embedding_parameters / layout.tp if stage == 0 else 0.0
    late = 0.0 if held or scenario.shape.tied else min(gradients, embedding * gradient_bytes(scenario))
    one = activations / max(1.0, layers_in_flight(scenario, stage))
    yield {"gradients": gradients - late, "activations": one, "working": working}
    yield {
        "gradients": gradients,
        "activations": layer_input_bytes(scenario),
        "working": embedding * scenario.element_bytes,
    }


def state_bytes_by_category(scenario: Scenario, stage: int) -> dict[str, int]:
    """What lies on a rank between steps, and every gradient, by shard.py's own function."""
    policy = sharding_policy(scenario)
    found: dict[str, float] = {}
    for unit, n in param_groups(scenario, stage):
        held = dp_cost.state_bytes(
            [unit],
            replace(policy, num_shards=unit.num_shards),
            compute_bytes=scenario.element_bytes,
            master_bytes=scenario.master_bytes,
            moments=NUM_MOMENTS,
            moment_bytes=scenario.moment_bytes,
            reduce_bytes=scenario.reduce_bytes,
            num_versions=_weight_versions(scenario, stage),
            float16=scenario.precision == "fp16",
        )
        for name, size in held.items():
            found[name] = found.get(name, 0) + n * size
    if scenario.optimizer is not None:
        found["optimizer"] = optimizer_update.optimizer_state_bytes(scenario, scenario.optimizer, stage)
    return {name: int(size) for name, size in found.items()}


def _weight_versions(scenario: Scenario, stage: int) -> int:
    """Of the weights, at once."""
    layout = scenario.layout
    if layout.schedule not in ASYNC_SCHEDULES or layout.pp == 1:
        return 1
    return 2 if layout.schedule == "2bw" else layout.pp if layout.schedule == "pipedream-vsync" else layout.pp - stage


def _low_precision_weights(scenario: Scenario) -> int:
    """Of the layers' weights in 8 bits, as they lie and transposed, which several microbatches share."""
    if not (
        scenario.has_kernels
        and scenario.is_low_precision
        and scenario.layout.accumulate > 1
        and scenario.layout.zero < 3
    ):
        return 0
    return int(
        2
        * max_layer_share(scenario)
        * sum(n * dense_parameters(layer, scenario.layout) for layer, n in scenario.shape.layers)
    )


def _working_bytes(
    scenario: Scenario, layer: LayerShape, c: Constants, recompute: RecomputePlan, gradients_resident: bool
) -> float:
    """Bytes that come and go while a layer runs; of those that are repeated, their activations too."""
    counted = scenario.has_kernels or scenario.is_unfused
    own = (
        backward_memory.backward_bytes(scenario, layer, gradients_resident=gradients_resident)
        if counted
        else c.working * saved_tensor_bytes(scenario, layer)
    )
    reaching = cp_working_bytes(scenario) if layer.attention else 0.0
    return own + recomputed_bytes(scenario, layer, recompute) + reaching


def _activation_bytes(scenario: Scenario, stage: int, recompute: RecomputePlan, c: Constants) -> float:
    """Of a rank at its fullest: those that the schedule keeps until backward."""
    shape = scenario.shape
    each = sum(n * saved_layer_bytes(scenario, layer, recompute) for layer, n in shape.layers) / shape.num_layers
    # What our models keep is counted to the byte.
    return (
        layers_in_flight(scenario, stage) * each * (1 if scenario.has_kernels or scenario.is_unfused else 1 + c.slack)
    )


def _first_gradient_bytes(scenario: Scenario) -> float:
    """Of the head and of the last layer."""
    last = dense_parameters(scenario.shape.layers[-1][0], scenario.layout)
    return (scenario.shape.head_parameters / scenario.layout.tp + last) * gradient_bytes(scenario)


def _comm_buffer_bytes(scenario: Scenario, stage: int) -> float:
    """Parameters gathered ahead under zero 3; gradients in a buffer of their own under 2 and 3."""
    largest = max(
        (gathered_numel(scenario, unit.num_shards * unit.shard_numel) for unit, _ in param_groups(scenario, stage)),
        default=0,
    )
    policy = sharding_policy(scenario)
    if policy.reshards_params:
        return largest * (2 * scenario.element_bytes + scenario.reduce_bytes)
    return largest * scenario.reduce_bytes if policy.reduce_scatter_every_microbatch else 0.0
