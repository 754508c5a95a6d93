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

from echelon.layout.layout import ASYNCHRONOUS
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.cost import has_states, left
from echelon.parallel.dp import zero
from echelon.planning.calibrate.constants import FITTED, Constants
from echelon.planning.cluster.cluster import HOST_DEVICES
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost import backward_memory, optimizer_update
from echelon.planning.cost.activation_memory import entry, layers_in_flight, tensors
from echelon.planning.cost.cp_traffic import room
from echelon.planning.cost.lm_head_memory import head_bytes
from echelon.planning.cost.param_group_traffic import (
    MOMENTS,
    fullest_share,
    gradient_bytes,
    largest_unit,
    own_parameters,
    policy_of,
    units_of,
)
from echelon.planning.cost.recompute_cost import Doing, doing, kept_of, made_again
from echelon.planning.model.model_shape import Layer
from echelon.planning.scenario import Case


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One rank's bytes at its fullest."""

    stage: int
    """of the pipeline"""
    parts: dict[str, int]
    """by category"""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def worst(case: Case, c: Constants = FITTED) -> Memory:
    """Of the fullest rank."""
    return max((of_stage(case, stage, c) for stage in stages_to_ask(case)), key=lambda memory: memory.total)


def fits(case: Case, c: Constants = FITTED) -> bool:
    """No rank needs more than a device has."""
    return all(of_stage(case, stage, c).total <= case.cluster.memory for stage in stages_to_ask(case))


def stages_to_ask(case: Case) -> list[int]:
    """The first, the second and the last: others hold no more."""
    return sorted({0, min(1, case.layout.pp - 1), case.layout.pp - 1})


def of_stage(case: Case, stage: int, c: Constants = FITTED) -> Memory:
    still = _still(case, stage, c)
    moments = [still | moment for moment in _moments(case, stage, still.pop("gradients"), c)]
    parts = _fullest(moments)
    if case.layout.offload != "none":
        share = _share(case, stage, moments)
        stay = _fullest(_left(case, stage, moments, share))
        away = share * _on_host(case, stage, still["optimizer"]) + max(
            0, parts.get("activations", 0) - stay.get("activations", 0)
        )
        host = case.cluster.host_memory / min(case.cluster.per_node, HOST_DEVICES)
        parts = {**stay, "beyond the host": max(0, int(away - host))}
    return Memory(stage=stage, parts={name: size for name, size in parts.items() if size})


def share_away(case: Case, stage: int = 0, c: Constants = FITTED) -> float:
    """Of the states, those that leave the device."""
    still = _still(case, stage, c)
    moments = [still | moment for moment in _moments(case, stage, still.pop("gradients"), c)]
    return _share(case, stage, moments)


def _share(case: Case, stage: int, moments: Sequence[Mapping[str, float]]) -> float:
    """As `memory.host` asks; otherwise as few as make a rank fit."""
    if not has_states(case.layout.offload):
        return 0.0
    if case.host is not None:
        return case.host
    if not case.on_gpu:
        return 1.0
    none, every = (sum(_fullest(_left(case, stage, moments, share)).values()) for share in (0.0, 1.0))
    needed = (none - case.cluster.memory) / max(1, none - every)
    return min(1.0, math.ceil(max(0.0, needed) * 1000) / 1000)


def _on_host(case: Case, stage: int, optimizer: float) -> float:
    """Bytes of states, and of gradients that come down: a master value is whole there, and half of one on a device."""
    units, kinds = units_of(case, stage), case.layout.offload
    if not has_states(kinds):
        return 0.0
    early = 0 if offload_cost.pages(kinds) or policy_of(case).sums_gradients else case.element_bytes
    size = sum(n * unit.shard_numel for unit, n in units)
    return sum(
        n
        * offload_cost.held(
            [unit],
            paged=offload_cost.pages(kinds),
            disk="disk" in kinds.split("+"),
            compute_bytes=case.element_bytes,
            master_bytes=case.master_bytes,
            state_bytes=optimizer / size,
            early_bytes={unit.name: early},
        )["host"]
        for unit, n in units
    )


def _left(case: Case, stage: int, moments: Sequence[Mapping[str, float]], share: float) -> list[dict[str, int]]:
    sizes = {unit.name: n * unit.shard_numel for unit, n in units_of(case, stage)}
    found = partial(
        left,
        case.layout.offload,
        layers=layers_in_flight(case, stage),
        ends=sizes.get("ends", 0) / max(1, sum(sizes.values())),
        share=share,
        final=not policy_of(case).sums_gradients,
    )
    return [found(moment) for moment in moments]


def _fullest(moments: Iterable[Mapping[str, float]]) -> dict[str, int]:
    return {name: int(size) for name, size in max(moments, key=lambda moment: sum(moment.values())).items()}


def _still(case: Case, stage: int, c: Constants) -> dict[str, float]:
    """What does not come and go, and every gradient."""
    found = states(case, stage)
    found["parameters"] += _narrow_weights(case)
    return {**found, "buffers": int(_buffers(case, stage)), "reserve": int(c.context * GIB)}


def _moments(case: Case, stage: int, gradients: float, c: Constants) -> Iterator[dict[str, float]]:
    """What comes and goes, at each moment that may be the fullest: see [Note: the fullest moment]."""
    layout, done = case.layout, doing(case)
    in_turn = optimizer_update.lets_go(case)
    gradients = min(gradients, optimizer_update.living_gradients(case)) if in_turn else gradients
    lazy = case.program != "others" and case.on_gpu
    held = not lazy or layout.accumulate * layout.pp > 1
    has_head = stage == layout.pp - 1
    activations = _activations(case, stage, done, c)
    logits = head_bytes(case, held) if has_head else 0.0
    working = max(_working(case, layer, c, done, held) for layer, _ in case.shape.layers)
    if not lazy:
        # The head has let go of its logits before a layer's backward begins: the larger of the two counts.
        beyond = max(0.0, int(working) - int(logits))
        yield {"gradients": gradients, "activations": activations, "logits": logits, "working": beyond}
        return
    yield {"gradients": gradients if held else 0, "activations": activations, "logits": logits}
    first = gradients if held else min(gradients, _first_gradients(case))
    yield {"gradients": first, "activations": activations, "working": working}
    embedding = case.shape.embedding_parameters / layout.tp if stage == 0 else 0.0
    late = 0.0 if held or case.shape.tied else min(gradients, embedding * gradient_bytes(case))
    one = activations / max(1.0, layers_in_flight(case, stage))
    yield {"gradients": gradients - late, "activations": one, "working": working}
    yield {"gradients": gradients, "activations": entry(case), "working": embedding * case.element_bytes}


def states(case: Case, stage: int) -> dict[str, int]:
    """What lies on a rank between steps, and every gradient, by shard.py's own function."""
    policy = policy_of(case)
    found: dict[str, float] = {}
    for unit, n in units_of(case, stage):
        held = zero.state_bytes(
            [unit],
            replace(policy, shards=unit.shards),
            compute_bytes=case.element_bytes,
            master_bytes=case.master_bytes,
            moments=MOMENTS,
            moment_bytes=case.moment_bytes,
            reduce_bytes=case.reduce_bytes,
            versions=_versions(case, stage),
            float16=case.precision == "fp16",
        )
        for name, size in held.items():
            found[name] = found.get(name, 0) + n * size
    if case.rule is not None:
        found["optimizer"] = optimizer_update.state_bytes(case, case.rule, stage)
    return {name: int(size) for name, size in found.items()}


def _versions(case: Case, stage: int) -> int:
    """Of the weights, at once."""
    layout = case.layout
    if layout.schedule not in ASYNCHRONOUS or layout.pp == 1:
        return 1
    return 2 if layout.schedule == "2bw" else layout.pp if layout.schedule == "pipedream-vsync" else layout.pp - stage


def _narrow_weights(case: Case) -> int:
    """Of the layers' weights in 8 bits, as they lie and transposed, which several microbatches share."""
    if not (case.has_kernels and case.is_narrow and case.layout.accumulate > 1 and case.layout.zero < 3):
        return 0
    return int(2 * fullest_share(case) * sum(n * own_parameters(layer, case.layout) for layer, n in case.shape.layers))


def _working(case: Case, layer: Layer, c: Constants, done: Doing, held: bool) -> float:
    """Bytes that come and go while a layer runs; of those that are repeated, their activations too."""
    counted = case.has_kernels or case.is_plain
    own = backward_memory.room(case, layer, held=held) if counted else c.working * tensors(case, layer)
    reaching = room(case) if layer.attention else 0.0
    return own + made_again(case, layer, done) + reaching


def _activations(case: Case, stage: int, done: Doing, c: Constants) -> float:
    """Of a rank at its fullest: those that the schedule keeps until backward."""
    shape = case.shape
    each = sum(n * kept_of(case, layer, done) for layer, n in shape.layers) / shape.num_layers
    # What our models keep is counted to the byte.
    return layers_in_flight(case, stage) * each * (1 if case.has_kernels or case.is_plain else 1 + c.slack)


def _first_gradients(case: Case) -> float:
    """Of the head and of the last layer."""
    last = own_parameters(case.shape.layers[-1][0], case.layout)
    return (case.shape.head_parameters / case.layout.tp + last) * gradient_bytes(case)


def _buffers(case: Case, stage: int) -> float:
    """Parameters gathered ahead under zero 3; gradients in a buffer of their own under 2 and 3."""
    largest = max((largest_unit(case, unit.shards * unit.shard_numel) for unit, _ in units_of(case, stage)), default=0)
    policy = policy_of(case)
    if policy.free_parameters:
        return largest * (2 * case.element_bytes + case.reduce_bytes)
    return largest * case.reduce_bytes if policy.scatter_every_microbatch else 0.0
