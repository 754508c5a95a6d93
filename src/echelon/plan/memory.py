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
from echelon.parallel import shard
from echelon.pipeline.schedules import FAMILIES
from echelon.plan.case import Case
from echelon.plan.constants import FITTED, Constants
from echelon.plan.device import GIB
from echelon.plan.shape import Layer
from echelon.plan.work import units_of

MASTER_BYTES = 4
LOGIT_BYTES = 12
"""of a logit in the compute type and in 32 bits, and of its gradient likewise"""
SCORE_BYTES = 7
"""of a score that is written out: before and after the softmax, after dropout, and its mask"""
LOOSE_NORMS = 7
"""elements per element of width that norms of several kernels save in a layer: their steps, in 32 bits"""
WRITTEN_OUT = ("plain", "fused")
NARROW_SAVED = 0.75
"""bytes that activations take where products are narrow, to those in 16 bits: inputs of products are kept narrow"""


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


def stages_to_ask(case: Case) -> list[int]:
    """The first, the second and the last: others hold no more."""
    return sorted({0, min(1, case.layout.pp - 1), case.layout.pp - 1})


def of_stage(case: Case, stage: int, c: Constants = FITTED) -> Memory:
    parts = states(case, stage)
    parts["activations"] = int(_in_flight(case, stage) * (1 + c.slack))
    parts["logits"] = int(_logits(case)) if stage == case.layout.pp - 1 else 0
    # The head has let go of its logits before a layer's backward begins: the larger of the two counts.
    working = max(_working(case, layer, c) for layer, _ in case.shape.layers)
    parts["working"] = max(0, int(working) - parts["logits"])
    parts["buffers"] = int(_buffers(case, stage))
    parts["reserve"] = int(c.context * GIB)
    return Memory(stage=stage, parts={name: size for name, size in parts.items() if size})


def states(case: Case, stage: int) -> dict[str, int]:
    """What lies on a rank between steps, by shard.py's own function."""
    layout = case.layout
    policy = shard.policy(layout)
    found: dict[str, float] = {}
    for unit, n in units_of(case, stage):
        held = shard.state_bytes(
            [unit],
            replace(policy, shards=unit.shards),
            compute_bytes=case.element_bytes,
            master_bytes=MASTER_BYTES,
            moments=2,
            versions=_versions(case, stage),
        )
        for name, size in held.items():
            found[name] = found.get(name, 0) + n * size
    found["gradients"] *= case.reduce_bytes / MASTER_BYTES  # shard.py's own are of the master's type
    return {name: int(size) for name, size in found.items()}


def _versions(case: Case, stage: int) -> int:
    """Of the weights, at once."""
    layout = case.layout
    if layout.schedule not in ASYNCHRONOUS or layout.pp == 1:
        return 1
    return 2 if layout.schedule == "2bw" else layout.pp if layout.schedule == "pipedream-vsync" else layout.pp - stage


def _working(case: Case, layer: Layer, c: Constants) -> float:
    """Bytes that come and go while a layer runs; where it is recomputed, its activations too."""
    tensors = _tensors(case, layer)
    return c.working * tensors + (tensors + _scores(case, layer) if case.layout.recompute == "full" else 0.0)


def saved(case: Case, layer: Layer) -> float:
    """Bytes that backward needs of one layer and one microbatch, without recomputation."""
    return _tensors(case, layer) + (_scores(case, layer) if case.layout.recompute != "selective" else 0.0)


def _tensors(case: Case, layer: Layer) -> float:
    """All but attention's scores."""
    layout, tokens = case.layout, case.tokens
    sliced = layout.tp if layout.sp else 1
    spread = max(1, layout.tp // layout.etp)
    elements = layer.saved / sliced + layer.saved_split / layout.tp + layer.saved_experts / spread
    narrow = NARROW_SAVED if case.precision in ("fp8", "fp4") else 1.0
    elements += 0 if case.fused_norms else LOOSE_NORMS * case.shape.width / sliced
    return elements * tokens * case.element_bytes * narrow


def _scores(case: Case, layer: Layer) -> float:
    if case.attention not in WRITTEN_OUT or layer.attention is None:
        return 0.0
    return SCORE_BYTES * layer.attention.heads / case.layout.tp * case.tokens * case.seq_len


def kept(case: Case, layer: Layer) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    if case.layout.recompute == "full":
        return case.tokens * case.shape.width * case.element_bytes / (case.layout.tp if case.layout.sp else 1)
    return saved(case, layer)


def _in_flight(case: Case, stage: int) -> float:
    """Activations of a rank at its fullest: those that the schedule keeps until backward."""
    layout, shape = case.layout, case.shape
    each = sum(n * kept(case, layer) for layer, n in shape.layers) / shape.num_layers
    family = FAMILIES.get(layout.schedule)
    if layout.pp == 1 or family is None:
        flights = 1.0
        layers = float(shape.num_layers)
    else:
        chunks = family.chunks or layout.vpp
        held = family.in_flight(layout.pp, chunks, layout.accumulate)
        flights = float(held[stage])
        layers = shape.num_layers / (layout.pp * chunks)
    return flights * layers * each


def _logits(case: Case) -> float:
    return case.tokens * case.shape.vocab / case.layout.tp * LOGIT_BYTES


def _buffers(case: Case, stage: int) -> float:
    """Parameters gathered ahead under zero 3; gradients in a buffer of their own under 2 and 3."""
    layout = case.layout
    largest = max((unit.shards * unit.shard_numel for unit, _ in units_of(case, stage)), default=0)
    if layout.zero == 3 and layout.shards > 1:
        return largest * (2 * case.element_bytes + case.reduce_bytes)
    return largest * case.reduce_bytes if layout.zero == 2 and layout.shards > 1 else 0.0
