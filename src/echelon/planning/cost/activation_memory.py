"""Bytes that backward needs of the forward pass, per layer and microbatch, for each recompute form of a layer:

    none        everything that backward reads
    ops         all but the outputs of operators between GEMMs, which backward recomputes
    selective   all but what the attention core computes
    full        the layer's input

For Echelon's models they are counted from what operators save (layer_counts.py). For others `ops` saves an assumed
share, or what the modules save that Megatron recomputes; `selective` drops the scores alone, or is what programs of
torch and XLA mean by it (program_memory.py). `compress` and `memory.partition` shrink what is saved.
"""

from __future__ import annotations

import math
from functools import lru_cache

from echelon.memory.checkpointing.cost import ELEMENTWISE_SHARE, partition_numel
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.pipeline.schedules import FAMILIES
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cost.cp_traffic import saved_cp_bytes
from echelon.planning.cost.program_memory import (
    RECOMPUTED_MODULE_PROGRAMS,
    SAVED_OUTPUT_PROGRAMS,
    activation_factor_elements,
    program_memory,
    recomputed_module_elements,
    saved_output_elements,
)
from echelon.planning.model.layer_counts import NORM_STAT_BYTES, LayerCounts
from echelon.planning.model.model_shape import LayerShape
from echelon.planning.scenario import Scenario

UNFUSED_SCORE_BYTES = 7
"""of a materialized score in other programs: before and after the softmax, after dropout, and its mask"""
FP32_BYTES = 4
"""of a score after Echelon's softmax; dropout adds a mask of one byte, and what remains of the score"""
LOW_PRECISION_SAVED = 0.75
"""saved bytes with low-precision GEMMs, which save their inputs in low precision, over those in 16 bits"""


def saved_tensor_bytes(scenario: Scenario, layer: LayerShape, form: str = "none") -> float:
    """Bytes that one layer saves of one microbatch, scores aside; not for the form `full`."""
    counts = layer_counts(scenario, layer)
    if counts is not None:
        return _counted_bytes(scenario, layer, counts, form)
    if form == "selective" and scenario.program in SAVED_OUTPUT_PROGRAMS:
        return saved_output_elements(scenario, layer) * scenario.tokens * scenario.element_bytes
    layout, sp_degree = scenario.layout, scenario.sp_degree
    elements = layer.saved_elements / sp_degree + layer.saved_elements_tp / layout.tp
    elements *= layer.gathered_factor(layer.gathered_saved, layout.cp)
    if program_memory(scenario, FITTED_CONSTANTS).saves_activation_factor:
        elements += activation_factor_elements(layer) / layout.tp
    # Every etp rank has all tokens of its experts, and a part of what is inside them.
    expert_elements = layout.etp * layer.dispatched_elements + layer.saved_elements_experts
    elements += min(scenario.expert_load, MAX_LOAD_FACTOR) * expert_elements / layout.tp
    elements += 0 if scenario.fused_norms else FITTED_CONSTANTS.unfused_norm_saved * scenario.shape.width / sp_degree
    precision_share = LOW_PRECISION_SAVED if scenario.is_low_precision else 1.0
    form_share = 1 - ELEMENTWISE_SHARE if "ops" in form else 1.0
    if "ops" in form and scenario.program in RECOMPUTED_MODULE_PROGRAMS:
        form_share = 1 - recomputed_module_elements(scenario, layer) / elements
    return form_share * elements * scenario.tokens * scenario.element_bytes * precision_share


def layer_counts(scenario: Scenario, layer: LayerShape) -> LayerCounts | None:
    """The counts of a layer of Echelon's models, with kernels or without; None for other models."""
    if scenario.has_kernels:
        return layer.fused
    return layer.unfused if scenario.is_unfused else None


def _counted_bytes(scenario: Scenario, layer: LayerShape, counts: LayerCounts, form: str) -> float:
    layout, size, low_precision = scenario.layout, scenario.element_bytes, scenario.is_low_precision
    recompute_ops, selective = "ops" in form, "selective" in form
    saved = counts.bytes_saved(
        element_bytes=size, low_precision=low_precision, recompute_ops=recompute_ops, selective=selective
    )
    load = min(scenario.expert_load, MAX_LOAD_FACTOR)
    per_token = saved.per_rank(scenario.sp_degree, layout.tp, etp=layout.etp, expert_load=load) + NORM_STAT_BYTES
    if layout.sp and layout.tp > 1 and layout.tp_kind == "1d":
        per_token += counts.gathered_bytes(
            layout.tp, element_bytes=size, low_precision=low_precision, recompute_ops=recompute_ops
        )
    attention = layer.attention
    if attention is None:
        return per_token * scenario.tokens
    if not selective and scenario.materializes_scores:
        # Keys and values are repeated for every query head; the output already has the projection's memory layout.
        repeated = (attention.heads - attention.kv_heads) * (attention.head_dim + attention.value_dim)
        per_token += size * (repeated - counts.attention_copy.tp) / layout.tp
    elif not selective:
        per_token += 4 * attention.heads / layout.tp  # log-sum-exp
    return per_token * scenario.tokens + saved_cp_bytes(scenario)


def score_bytes(scenario: Scenario, layer: LayerShape) -> float:
    """Bytes of attention's scores, if they are materialized."""
    if not scenario.materializes_scores or layer.attention is None:
        return 0.0
    scores = layer.attention.heads / scenario.layout.tp * scenario.tokens * scenario.seq_len
    if layer_counts(scenario, layer) is None:
        return UNFUSED_SCORE_BYTES * scores
    if not scenario.shape.dropout:
        return FP32_BYTES * scores
    attention_mask = scenario.seq_len * scenario.seq_len  # one byte for each pair of tokens
    return (FP32_BYTES + 1 + scenario.element_bytes) * scores + attention_mask


def layer_input_bytes(scenario: Scenario) -> float:
    return scenario.tokens * scenario.shape.width * scenario.element_bytes / scenario.sp_degree


def saved_bytes(scenario: Scenario, layer: LayerShape, form: str) -> float:
    """Bytes that one layer saves of one microbatch."""
    if form == "full":
        return saved_input_bytes(scenario)
    size = saved_tensor_bytes(scenario, layer, form) + (0.0 if "selective" in form else score_bytes(scenario, layer))
    if not scenario.memory_options.compresses:
        return size
    return _compressed_bytes(scenario, size, dropout_mask_bytes(scenario, layer, form))


def saved_input_bytes(scenario: Scenario) -> float:
    """Bytes of a layer's input as it is saved: partitioned over tp, compressed."""
    size = layer_input_bytes(scenario)
    if partitions_inputs(scenario):
        size = partition_numel(round(size), scenario.layout.tp)
    return _compressed_bytes(scenario, size, 0.0) if scenario.memory_options.compresses else size


def partitions_inputs(scenario: Scenario) -> bool:
    """Whether `memory.partition` has an effect: all tp ranks save the same inputs."""
    layout = scenario.layout
    return scenario.memory_options.partition and layout.tp > 1 and layout.tp_kind == "1d" and not layout.sp


def dropout_mask_bytes(scenario: Scenario, layer: LayerShape, form: str) -> float:
    """Of the saved bytes, dropout masks: one byte per element."""
    if not scenario.shape.dropout:
        return 0.0
    residual = 2 * scenario.shape.width * scenario.tokens / scenario.sp_degree
    if layer.attention is None or not scenario.materializes_scores or "selective" in form:
        return residual
    return residual + layer.attention.heads / scenario.layout.tp * scenario.tokens * scenario.seq_len


def _compressed_bytes(scenario: Scenario, size: float, mask_bytes: float) -> float:
    return scenario.memory_options.compressed_bytes(size - mask_bytes, mask_bytes, scenario.element_bytes)


def layers_in_flight(scenario: Scenario, rank: int) -> float:
    """Layers times microbatches whose activations the schedule has a rank hold at once."""
    layout = scenario.layout
    family = FAMILIES.get(layout.schedule)
    if layout.pp == 1 or family is None:
        return float(scenario.shape.num_layers)
    chunks = family.chunks or layout.vpp
    chunks_in_flight = _chunks_in_flight(layout.schedule, layout.pp, chunks, layout.accumulate)[rank]
    return float(chunks_in_flight * math.ceil(scenario.shape.num_layers / (layout.pp * chunks)))


@lru_cache(maxsize=4096)
def _chunks_in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return FAMILIES[schedule].in_flight(ranks, chunks, microbatches)
