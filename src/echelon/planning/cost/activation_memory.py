"""What backward needs of the forward pass, in bytes: of a layer and microbatch, in each way that the layer can go.

    none        everything that backward reads
    ops         all but what operators between products made, which is made again
    selective   all but what attention's core made
    full        the layer's input

What our models keep is counted from what their operators save (kernels.py, plain_layers.py); of others, a share is
assumed for `ops`, and attention's scores alone are dropped by `selective`. `compress` and `memory.partition` make less
of what is kept (thrift.py).
"""

from __future__ import annotations

import math
from functools import lru_cache

from echelon.memory.checkpointing.cost import OPERATORS, partitioned
from echelon.parallel.ep.expert_parallel import CEILING
from echelon.pipeline.schedules import FAMILIES
from echelon.planning.calibrate.constants import FITTED
from echelon.planning.cost.cp_traffic import beside
from echelon.planning.cost.kernel_traffic import ROW_BYTES, KernelCounts
from echelon.planning.model.model_shape import Layer
from echelon.planning.scenario import Case

SCORE_BYTES = 7
"""of a score that is written out: before and after the softmax, after dropout, and its mask"""
WIDE = 4
"""of one of ours, after the softmax. With dropout there is a mask of one byte, and what is left of it"""
NARROW_SAVED = 0.75
"""bytes that activations take where products are narrow, to those in 16 bits: inputs of products are kept narrow"""


def tensors(case: Case, layer: Layer, form: str = "none") -> float:
    """Bytes that backward needs of one layer and one microbatch, but for attention's scores; not of `full`."""
    counts = counts_of(case, layer)
    if counts is not None:
        return _counted(case, layer, counts, form)
    layout, whole = case.layout, case.sliced
    elements = layer.saved / whole + layer.saved_split / layout.tp
    # A row goes to each of etp ranks, which have a part of what is inside its expert.
    elements += min(case.crowd, CEILING) * (layout.etp * layer.sent + layer.saved_experts) / layout.tp
    elements += 0 if case.fused_norms else FITTED.loose_saved * case.shape.width / whole
    narrow = NARROW_SAVED if case.is_narrow else 1.0
    share = 1 - OPERATORS if "ops" in form else 1.0
    return share * elements * case.tokens * case.element_bytes * narrow


def counts_of(case: Case, layer: Layer) -> KernelCounts | None:
    """What is known of a layer of a model of ours."""
    if case.has_kernels:
        return layer.kernels
    return layer.plain if case.is_plain else None


def _counted(case: Case, layer: Layer, counts: KernelCounts, form: str) -> float:
    layout, attention, selects = case.layout, layer.attention, "selective" in form
    kept = counts.bytes_kept(
        element_bytes=case.element_bytes, narrow=case.is_narrow, remakes="ops" in form, selects=selects
    )
    here = kept.on_rank(case.sliced, layout.tp, etp=layout.etp, crowd=min(case.crowd, CEILING)) + ROW_BYTES
    if layout.sp and layout.tp > 1 and layout.tp_kind == "1d":
        here += counts.bytes_gathered(
            layout.tp, element_bytes=case.element_bytes, narrow=case.is_narrow, remakes="ops" in form
        )
    copies = 0.0
    if attention is not None:
        copies = beside(case)
        if case.writes_scores and not selects:  # keys and values for every head; and the result is where it is read
            repeated = (attention.heads - attention.kv_heads) * (attention.head_dim + attention.value_dim)
            here += case.element_bytes * (repeated - counts.apart.split) / layout.tp
        elif not selects:
            here += 4 * attention.heads / layout.tp  # logarithms, of each row
    return here * case.tokens + copies


def scores(case: Case, layer: Layer) -> float:
    """Bytes of attention's scores, where they are written out."""
    if not case.writes_scores or layer.attention is None:
        return 0.0
    every = layer.attention.heads / case.layout.tp * case.tokens * case.seq_len
    if counts_of(case, layer) is None:
        return SCORE_BYTES * every
    if not case.shape.dropout:
        return WIDE * every
    seen = case.seq_len * case.seq_len  # a byte for each pair of tokens: which may see which
    return (WIDE + 1 + case.element_bytes) * every + seen


def entry(case: Case) -> float:
    """Bytes of a layer's input."""
    return case.tokens * case.shape.width * case.element_bytes / case.sliced


def kept(case: Case, layer: Layer, form: str) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    if form == "full":
        return kept_entry(case)
    values = tensors(case, layer, form) + (0.0 if "selective" in form else scores(case, layer))
    return _packed(case, values, masks(case, layer, form)) if case.thrift.packs else values


def kept_entry(case: Case) -> float:
    """Bytes of a layer's input as it is kept."""
    found = entry(case)
    if divides(case):
        found = partitioned(round(found), case.layout.tp)
    return _packed(case, found, 0.0) if case.thrift.packs else found


def divides(case: Case) -> bool:
    """`memory.partition` has something to do: every rank of tp has the same inputs."""
    layout = case.layout
    return case.thrift.partition and layout.tp > 1 and layout.tp_kind == "1d" and not layout.sp


def masks(case: Case, layer: Layer, form: str) -> float:
    """Of the bytes kept, masks of dropout: a byte each."""
    if not case.shape.dropout:
        return 0.0
    stream = 2 * case.shape.width * case.tokens / case.sliced
    if layer.attention is None or not case.writes_scores or "selective" in form:
        return stream
    return stream + layer.attention.heads / case.layout.tp * case.tokens * case.seq_len


def _packed(case: Case, size: float, flags: float) -> float:
    return case.thrift.packed(size - flags, flags, case.element_bytes)


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
