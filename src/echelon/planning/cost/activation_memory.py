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
from echelon.planning.model.layer_counts import NORM_STAT_BYTES, LayerCounts
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

UNFUSED_SCORE_BYTES = 7
"""of a score that is written out: before and after the softmax, after dropout, and its mask"""
FP32_BYTES = 4
"""of one of ours, after the softmax. With dropout there is a mask of one byte, and what is left of it"""
LOW_PRECISION_SAVED = 0.75
"""bytes that activations take where products are narrow, to those in 16 bits: inputs of products are kept narrow"""


def saved_tensor_bytes(scenario: Scenario, layer: LayerShape, form: str = "none") -> float:
    """Bytes that backward needs of one layer and one microbatch, but for attention's scores; not of `full`."""
    counts = layer_counts(scenario, layer)
    if counts is not None:
        return _counted_bytes(scenario, layer, counts, form)
    layout, whole = scenario.layout, scenario.sp_degree
    elements = layer.saved_elements / whole + layer.saved_elements_tp / layout.tp
    # A row goes to each of etp ranks, which have a part of what is inside its expert.
    elements += (
        min(scenario.expert_load, MAX_LOAD_FACTOR)
        * (layout.etp * layer.dispatched_elements + layer.saved_elements_experts)
        / layout.tp
    )
    elements += 0 if scenario.fused_norms else FITTED_CONSTANTS.loose_saved * scenario.shape.width / whole
    narrow = LOW_PRECISION_SAVED if scenario.is_low_precision else 1.0
    share = 1 - ELEMENTWISE_SHARE if "ops" in form else 1.0
    return share * elements * scenario.tokens * scenario.element_bytes * narrow


def layer_counts(scenario: Scenario, layer: LayerShape) -> LayerCounts | None:
    """What is known of a layer of a model of ours."""
    if scenario.has_kernels:
        return layer.fused
    return layer.unfused if scenario.is_unfused else None


def _counted_bytes(scenario: Scenario, layer: LayerShape, counts: LayerCounts, form: str) -> float:
    layout, attention, selects = scenario.layout, layer.attention, "selective" in form
    kept = counts.bytes_saved(
        element_bytes=scenario.element_bytes,
        low_precision=scenario.is_low_precision,
        recompute_ops="ops" in form,
        selective=selects,
    )
    here = (
        kept.per_rank(
            scenario.sp_degree, layout.tp, etp=layout.etp, expert_load=min(scenario.expert_load, MAX_LOAD_FACTOR)
        )
        + NORM_STAT_BYTES
    )
    if layout.sp and layout.tp > 1 and layout.tp_kind == "1d":
        here += counts.gathered_bytes(
            layout.tp,
            element_bytes=scenario.element_bytes,
            low_precision=scenario.is_low_precision,
            recompute_ops="ops" in form,
        )
    copies = 0.0
    if attention is not None:
        copies = saved_cp_bytes(scenario)
        if (
            scenario.materializes_scores and not selects
        ):  # keys and values for every head; and the result is where it is read
            repeated = (attention.heads - attention.kv_heads) * (attention.head_dim + attention.value_dim)
            here += scenario.element_bytes * (repeated - counts.attention_copy.tp) / layout.tp
        elif not selects:
            here += 4 * attention.heads / layout.tp  # logarithms, of each row
    return here * scenario.tokens + copies


def score_bytes(scenario: Scenario, layer: LayerShape) -> float:
    """Bytes of attention's scores, where they are written out."""
    if not scenario.materializes_scores or layer.attention is None:
        return 0.0
    every = layer.attention.heads / scenario.layout.tp * scenario.tokens * scenario.seq_len
    if layer_counts(scenario, layer) is None:
        return UNFUSED_SCORE_BYTES * every
    if not scenario.shape.dropout:
        return FP32_BYTES * every
    seen = scenario.seq_len * scenario.seq_len  # a byte for each pair of tokens: which may see which
    return (FP32_BYTES + 1 + scenario.element_bytes) * every + seen


def layer_input_bytes(scenario: Scenario) -> float:
    """Bytes of a layer's input."""
    return scenario.tokens * scenario.shape.width * scenario.element_bytes / scenario.sp_degree


def saved_bytes(scenario: Scenario, layer: LayerShape, form: str) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    if form == "full":
        return saved_input_bytes(scenario)
    values = saved_tensor_bytes(scenario, layer, form) + (0.0 if "selective" in form else score_bytes(scenario, layer))
    return (
        _compressed_bytes(scenario, values, dropout_mask_bytes(scenario, layer, form))
        if scenario.memory_options.compresses
        else values
    )


def saved_input_bytes(scenario: Scenario) -> float:
    """Bytes of a layer's input as it is kept."""
    found = layer_input_bytes(scenario)
    if partitions_inputs(scenario):
        found = partition_numel(round(found), scenario.layout.tp)
    return _compressed_bytes(scenario, found, 0.0) if scenario.memory_options.compresses else found


def partitions_inputs(scenario: Scenario) -> bool:
    """`memory.partition` has something to do: every rank of tp has the same inputs."""
    layout = scenario.layout
    return scenario.memory_options.partition and layout.tp > 1 and layout.tp_kind == "1d" and not layout.sp


def dropout_mask_bytes(scenario: Scenario, layer: LayerShape, form: str) -> float:
    """Of the bytes kept, masks of dropout: a byte each."""
    if not scenario.shape.dropout:
        return 0.0
    stream = 2 * scenario.shape.width * scenario.tokens / scenario.sp_degree
    if layer.attention is None or not scenario.materializes_scores or "selective" in form:
        return stream
    return stream + layer.attention.heads / scenario.layout.tp * scenario.tokens * scenario.seq_len


def _compressed_bytes(scenario: Scenario, size: float, mask_bytes: float) -> float:
    return scenario.memory_options.compressed_bytes(size - mask_bytes, mask_bytes, scenario.element_bytes)


def layers_in_flight(scenario: Scenario, rank: int) -> float:
    """Layers times microbatches that the schedule has a rank hold at once."""
    layout = scenario.layout
    family = FAMILIES.get(layout.schedule)
    if layout.pp == 1 or family is None:
        return float(scenario.shape.num_layers)
    chunks = family.chunks or layout.vpp
    flights = _in_flight(layout.schedule, layout.pp, chunks, layout.accumulate)[rank]
    return float(flights * math.ceil(scenario.shape.num_layers / (layout.pp * chunks)))


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return FAMILIES[schedule].in_flight(ranks, chunks, microbatches)
