"""What backward needs of the forward pass, in bytes: of a layer and microbatch, and of a rank at its fullest."""

from __future__ import annotations

import math
from functools import lru_cache

from echelon.memory.repeats import OPERATORS, Repeats, repeats
from echelon.parallel.expert import CEILING
from echelon.pipeline.schedules import FAMILIES
from echelon.plan.case import Case
from echelon.plan.constants import FITTED
from echelon.plan.context import beside
from echelon.plan.kernels import ROW_BYTES
from echelon.plan.passing import passing_of
from echelon.plan.shape import Layer

SCORE_BYTES = 7
"""of a score that is written out: before and after the softmax, after dropout, and its mask"""
WRITTEN_OUT = ("plain", "fused")
NARROW_SAVED = 0.75
"""bytes that activations take where products are narrow, to those in 16 bits: inputs of products are kept narrow"""


def tensors(case: Case, layer: Layer) -> float:
    """Bytes that backward needs of one layer and one microbatch, but for attention's scores."""
    if case.has_kernels:
        return _by_kernels(case, layer, remakes=False)
    layout, whole = case.layout, case.sliced
    elements = layer.saved / whole + layer.saved_split / layout.tp
    # A row goes to each of etp ranks, which have a part of what is inside its expert.
    elements += min(case.crowd, CEILING) * (layout.etp * layer.sent + layer.saved_experts) / layout.tp
    elements += 0 if case.fused_norms else FITTED.loose_saved * case.shape.width / whole
    narrow = NARROW_SAVED if case.is_narrow else 1.0
    return elements * case.tokens * case.element_bytes * narrow


def _by_kernels(case: Case, layer: Layer, *, remakes: bool) -> float:
    """The same in a layer of a model of ours, of which what can be made again is, or is kept."""
    assert layer.kernels is not None
    kept = layer.kernels.bytes_kept(element_bytes=case.element_bytes, narrow=case.is_narrow, remakes=remakes)
    logarithms = 4 * layer.attention.heads / case.layout.tp if layer.attention else 0.0  # attention's, of each row
    copies = beside(case) if layer.attention else 0.0
    here = kept.on_rank(case.sliced, case.layout.tp, etp=case.layout.etp, crowd=min(case.crowd, CEILING))
    return (here + ROW_BYTES + logarithms) * case.tokens + copies


def scores(case: Case, layer: Layer) -> float:
    """Bytes of attention's scores, where they are written out."""
    if case.attention not in WRITTEN_OUT or layer.attention is None:
        return 0.0
    return SCORE_BYTES * layer.attention.heads / case.layout.tp * case.tokens * case.seq_len


def entry(case: Case) -> float:
    """Bytes of a layer's input."""
    return case.tokens * case.shape.width * case.element_bytes / case.sliced


def repeats_of(case: Case) -> Repeats:
    """What the layout's recomputation keeps and does again, on the first rank of a pipeline, which holds the most."""
    if case.layout.recompute == "none":
        return Repeats()
    shape = case.shape
    whole = sum(n * (tensors(case, layer) + scores(case, layer)) for layer, n in shape.layers) / shape.num_layers
    operators, passing = OPERATORS, 1.0
    if case.layout.recompute == "ops" and case.is_counted:
        left = sum(n * _by_kernels(case, layer, remakes=True) for layer, n in shape.layers) / shape.num_layers
        operators = 1 - left / whole
        passing = passing_of(case).again
    return repeats(
        case.layout.recompute,
        layers=layers_in_flight(case, 0),
        whole=whole,
        entry=entry(case),
        operators=operators,
        passing=passing,
    )


def kept(case: Case, layer: Layer, again: Repeats) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    whole = tensors(case, layer) + (0.0 if again.drops_scores else scores(case, layer))
    return again.kept * whole + again.inputs * entry(case)


def layers_in_flight(case: Case, rank: int) -> float:
    """Layers times microbatches that the schedule has a rank hold at once."""
    layout = case.layout
    family = FAMILIES.get(layout.schedule)
    if layout.pp == 1 or family is None:
        return float(case.shape.num_layers)
    chunks = family.chunks or layout.vpp
    flights = _in_flight(layout.schedule, layout.pp, chunks, layout.accumulate)[rank]
    return float(flights * math.ceil(case.shape.num_layers / (layout.pp * chunks)))


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return FAMILIES[schedule].in_flight(ranks, chunks, microbatches)
