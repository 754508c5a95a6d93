"""Bytes on a rank by category, from the strategies' own memory functions and the schedule itself.

states        shard.py's: parameters, master copies, gradients, optimizer, kept versions
activations   what backward needs of a layer and microbatch, times how many of them the schedule has in flight
working       what a layer's backward, or its recomputation, needs while it runs
logits        on the last stage: the head's output and its gradient
buffers       parameters gathered ahead, gradients on their way
reserve       the device's context, its communication library, the allocator's slack
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.layout.layout import ASYNCHRONOUS
from echelon.memory.offload import left
from echelon.memory.repeats import Repeats
from echelon.parallel import shard
from echelon.plan.activations import kept, layers_in_flight, repeats_of, scores, tensors
from echelon.plan.case import Case
from echelon.plan.cluster import HOST_DEVICES
from echelon.plan.constants import FITTED, Constants
from echelon.plan.device import GIB
from echelon.plan.shape import Layer
from echelon.plan.work import units_of

MASTER_BYTES = 4
LOGIT_BYTES = 12
"""of a logit in the compute type and in 32 bits, and of its gradient likewise"""


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


def by_rank(case: Case, c: Constants = FITTED) -> list[Memory]:
    """Of one rank of every stage: all ranks of a stage hold the same."""
    return [of_stage(case, stage, c) for stage in range(case.layout.pp)]


def stages_to_ask(case: Case) -> list[int]:
    """The first, the second and the last: others hold no more."""
    return sorted({0, min(1, case.layout.pp - 1), case.layout.pp - 1})


def of_stage(case: Case, stage: int, c: Constants = FITTED) -> Memory:
    parts, again = states(case, stage), repeats_of(case)
    parts["activations"] = int(_activations(case, stage, again) * (1 + c.slack))
    parts["logits"] = int(_logits(case)) if stage == case.layout.pp - 1 else 0
    # The head has let go of its logits before a layer's backward begins: the larger of the two counts.
    working = max(_working(case, layer, c, again) for layer, _ in case.shape.layers)
    parts["working"] = max(0, int(working) - parts["logits"])
    parts["buffers"] = int(_buffers(case, stage))
    parts["reserve"] = int(c.context * GIB)
    if case.layout.offload != "none":
        stay = left(case.layout.offload, parts, layers=layers_in_flight(case, stage))
        away = sum(parts.values()) - sum(stay.values())
        host = case.cluster.host_memory / min(case.cluster.per_node, HOST_DEVICES)
        parts = stay if "disk" in case.layout.offload else {**stay, "beyond the host": max(0, int(away - host))}
    return Memory(stage=stage, parts={name: size for name, size in parts.items() if size})


def states(case: Case, stage: int) -> dict[str, int]:
    """What lies on a rank between steps, by shard.py's own function."""
    layout = case.layout
    policy = shard.policy(layout)
    if layout.tp > 1 and layout.sp:  # norms have a part of their gradients on each rank of tp (sequence.py)
        policy = replace(policy, sums_gradients=True)
    found: dict[str, float] = {}
    for unit, n in units_of(case, stage):
        held = shard.state_bytes(
            [unit],
            replace(policy, shards=unit.shards),
            compute_bytes=case.element_bytes,
            master_bytes=MASTER_BYTES,
            moments=2,
            reduce_bytes=case.reduce_bytes,
            versions=_versions(case, stage),
        )
        for name, size in held.items():
            found[name] = found.get(name, 0) + n * size
    return {name: int(size) for name, size in found.items()}


def _versions(case: Case, stage: int) -> int:
    """Of the weights, at once."""
    layout = case.layout
    if layout.schedule not in ASYNCHRONOUS or layout.pp == 1:
        return 1
    return 2 if layout.schedule == "2bw" else layout.pp if layout.schedule == "pipedream-vsync" else layout.pp - stage


def _working(case: Case, layer: Layer, c: Constants, again: Repeats) -> float:
    """Bytes that come and go while a layer runs; of those that are repeated, their activations too."""
    return c.working * tensors(case, layer) + again.together * (tensors(case, layer) + scores(case, layer))


def _activations(case: Case, rank: int, again: Repeats) -> float:
    """Of a rank at its fullest: those that the schedule keeps until backward."""
    shape = case.shape
    each = sum(n * kept(case, layer, again) for layer, n in shape.layers) / shape.num_layers
    return layers_in_flight(case, rank) * each


def _logits(case: Case) -> float:
    return case.tokens * case.shape.vocab / case.layout.tp * LOGIT_BYTES


def _buffers(case: Case, stage: int) -> float:
    """Parameters gathered ahead under zero 3; gradients in a buffer of their own under 2 and 3."""
    layout = case.layout
    largest = max((unit.shards * unit.shard_numel for unit, _ in units_of(case, stage)), default=0)
    if layout.zero == 3 and layout.shards > 1:
        return largest * (2 * case.element_bytes + case.reduce_bytes)
    return largest * case.reduce_bytes if layout.zero == 2 and layout.shards > 1 else 0.0
