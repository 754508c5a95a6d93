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

from echelon.memory.checkpointing.cost import ELEMENTWISE_SHARE, partition_numel
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.pipeline.schedules import FAMILIES
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cost.cp_traffic import saved_cp_bytes
from echelon.planning.cost.kernel_traffic import NORM_STAT_BYTES, LayerCounts
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

UNFUSED_SCORE_BYTES = 7
"""of a score that is written out: before and after the softmax, after dropout, and its mask"""
FP32_BYTES = 4
"""of one of ours, after the softmax. With dropout there is a mask of one byte, and what is left of it"""
LOW_PRECISION_SAVED = 0.75
"""bytes that activations take where products are narrow, to those in 16 bits: inputs of products are kept narrow"""


def saved_tensor_bytes(case: Scenario, layer: LayerShape, form: str = "none") -> float:
    """Bytes that backward needs of one layer and one microbatch, but for attention's scores; not of `full`."""
    counts = layer_counts(case, layer)
    if counts is not None:
        return _counted_bytes(case, layer, counts, form)
    layout, whole = case.layout, case.sp_degree
    elements = layer.saved_elements / whole + layer.saved_elements_tp / layout.tp
    # A row goes to each of etp ranks, which have a part of what is inside its expert.
    elements += (
        min(case.expert_load, MAX_LOAD_FACTOR)
        * (layout.etp * layer.dispatched_elements + layer.saved_elements_experts)
        / layout.tp
    )
    elements += 0 if case.fused_norms else FITTED_CONSTANTS.loose_saved * case.shape.width / whole
    narrow = LOW_PRECISION_SAVED if case.is_low_precision else 1.0
    share = 1 - ELEMENTWISE_SHARE if "ops" in form else 1.0
    return share * elements * case.tokens * case.element_bytes * narrow


def layer_counts(case: Scenario, layer: LayerShape) -> LayerCounts | None:
    """What is known of a layer of a model of ours."""
    if case.has_kernels:
        return layer.fused
    return layer.unfused if case.is_unfused else None


def _counted_bytes(case: Scenario, layer: LayerShape, counts: LayerCounts, form: str) -> float:
    layout, attention, selects = case.layout, layer.attention, "selective" in form
    kept = counts.bytes_saved(
        element_bytes=case.element_bytes,
        low_precision=case.is_low_precision,
        recompute_ops="ops" in form,
        selective=selects,
    )
    here = (
        kept.per_rank(case.sp_degree, layout.tp, etp=layout.etp, expert_load=min(case.expert_load, MAX_LOAD_FACTOR))
        + NORM_STAT_BYTES
    )
    if layout.sp and layout.tp > 1 and layout.tp_kind == "1d":
        here += counts.gathered_bytes(
            layout.tp,
            element_bytes=case.element_bytes,
            low_precision=case.is_low_precision,
            recompute_ops="ops" in form,
        )
    copies = 0.0
    if attention is not None:
        copies = saved_cp_bytes(case)
        if (
            case.materializes_scores and not selects
        ):  # keys and values for every head; and the result is where it is read
            repeated = (attention.heads - attention.kv_heads) * (attention.head_dim + attention.value_dim)
            here += case.element_bytes * (repeated - counts.attention_copy.tp) / layout.tp
        elif not selects:
            here += 4 * attention.heads / layout.tp  # logarithms, of each row
    return here * case.tokens + copies


def score_bytes(case: Scenario, layer: LayerShape) -> float:
    """Bytes of attention's scores, where they are written out."""
    if not case.materializes_scores or layer.attention is None:
        return 0.0
    every = layer.attention.heads / case.layout.tp * case.tokens * case.seq_len
    if layer_counts(case, layer) is None:
        return UNFUSED_SCORE_BYTES * every
    if not case.shape.dropout:
        return FP32_BYTES * every
    seen = case.seq_len * case.seq_len  # a byte for each pair of tokens: which may see which
    return (FP32_BYTES + 1 + case.element_bytes) * every + seen


def layer_input_bytes(case: Scenario) -> float:
    """Bytes of a layer's input."""
    return case.tokens * case.shape.width * case.element_bytes / case.sp_degree


def saved_bytes(case: Scenario, layer: LayerShape, form: str) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    if form == "full":
        return saved_input_bytes(case)
    values = saved_tensor_bytes(case, layer, form) + (0.0 if "selective" in form else score_bytes(case, layer))
    return (
        _compressed_bytes(case, values, dropout_mask_bytes(case, layer, form))
        if case.memory_options.compresses
        else values
    )


def saved_input_bytes(case: Scenario) -> float:
    """Bytes of a layer's input as it is kept."""
    found = layer_input_bytes(case)
    if partitions_inputs(case):
        found = partition_numel(round(found), case.layout.tp)
    return _compressed_bytes(case, found, 0.0) if case.memory_options.compresses else found


def partitions_inputs(case: Scenario) -> bool:
    """`memory.partition` has something to do: every rank of tp has the same inputs."""
    layout = case.layout
    return case.memory_options.partition and layout.tp > 1 and layout.tp_kind == "1d" and not layout.sp


def dropout_mask_bytes(case: Scenario, layer: LayerShape, form: str) -> float:
    """Of the bytes kept, masks of dropout: a byte each."""
    if not case.shape.dropout:
        return 0.0
    stream = 2 * case.shape.width * case.tokens / case.sp_degree
    if layer.attention is None or not case.materializes_scores or "selective" in form:
        return stream
    return stream + layer.attention.heads / case.layout.tp * case.tokens * case.seq_len


def _compressed_bytes(case: Scenario, size: float, mask_bytes: float) -> float:
    return case.memory_options.compressed_bytes(size - mask_bytes, mask_bytes, case.element_bytes)


def layers_in_flight(case: Scenario, rank: int) -> float:
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
