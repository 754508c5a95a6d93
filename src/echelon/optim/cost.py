"""Bytes of optimizer states and of their updates. No torch: plans use this too.

    rule                    per element                  per matrix [n, m]             vectors
    adamw                   8, 4 (bf16), 2.03 (int8)     -                             8, 4, 8
    sgd                     0, or 4 with momentum        -                             the same
    lion                    4                            -                             4
    lamb                    8                            -                             8
    adafactor               0, or 4 with momentum        4 (n + m)                     4 more
    sm3                     0, or 4 with momentum        4 (n + m)                     4 more
    muon                    4; 8 where AdamW updates     -                             8

with master weights of 4 bytes or none (moments are at least float32). Row and column statistics are on every rank that
may hold a part of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from echelon.layout.placement import LogicalParam, Placement
from echelon.optim.matrix_shards import local_matrix_stack, matrix_stack
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.update_rule import UpdateRule, resolve_momentum

QUANTIZATION_BLOCK = 256
"""elements that share a scale in int8"""
NEWTON_SCHULZ_STEPS = 5
"""iterations with which Muon orthogonalizes a matrix"""
MIN_QUANTIZED_NUMEL = 4096
"""elements from which a parameter has int8 states"""


def state_bytes(rule: UpdateRule, shape: Sequence[int], *, name: str = "", master_bytes: int = 4) -> int:
    """Return the state bytes of a full parameter on one device."""
    entry = LogicalParam(name=name, names=(name,), shape=tuple(shape))
    return _piece_state_bytes(rule, entry, math.prod(shape), master_bytes)


def rank_state_bytes(
    rule: UpdateRule, placement: Placement, *, master_bytes: int = 4, param_groups: Container[str] | None = None
) -> int:
    """Return the state bytes of a rank, or of some parameter groups, without step counts (8 bytes each)."""
    return sum(
        _piece_state_bytes(rule, piece.param, piece.stop - piece.start, master_bytes)
        for piece in placement.pieces()
        if piece.param.trainable and (param_groups is None or piece.group_name in param_groups)
    )


def state_bytes_per_element(rule: UpdateRule, master_bytes: int = 4) -> float:
    """Return the state bytes per element of a large matrix, without row and column statistics."""
    matrix, size = LogicalParam(name="", names=("",), shape=(1 << 10, 1 << 10)), 1 << 20
    return _element_state_bytes(rule, matrix, size, max(master_bytes, 4)) / size


MATRIX_RULE_TRAFFIC = {"lamb": 38, "adafactor": 74, "sm3": 22, "muon": 37}
"""4-byte values per element that memory moves in the time of the update, as measured on an H200 (bench/optimizers.py);
Muon's GEMMs are counted apart"""
INT8_TRAFFIC_BYTES = 43
"""bytes, likewise, of AdamW with int8 moments, whose kernel is bound by the code search"""
EMA_TRAFFIC_BYTES = 12
"""bytes that a moving average of the weights adds"""


def update_traffic_bytes(rule: UpdateRule, *, master_bytes: int = 4, gradient_bytes: int = 4) -> float:
    """Return the bytes that the update of an element moves on a GPU; the norm reads its gradient once more."""
    average = EMA_TRAFFIC_BYTES if rule.ema else 0
    if rule.name == "adamw" and rule.states == "int8":
        return INT8_TRAFFIC_BYTES + gradient_bytes + average
    if rule.name in MATRIX_RULE_TRAFFIC:
        momentum = 2 * bool(resolve_momentum(rule)) if rule.name in ("adafactor", "sm3") else 0
        return 4 * (MATRIX_RULE_TRAFFIC[rule.name] + momentum) + gradient_bytes + average
    states = state_bytes_per_element(rule) - (master_bytes if rule.ema else 0)
    return 2 * (master_bytes + states) + 2 * gradient_bytes + average


def is_factored(rule: UpdateRule, entry: LogicalParam) -> bool:
    return rule.name in ("adafactor", "sm3") and matrix_stack(entry.shape, filters=entry.is_conv).is_factored


def has_int8_state(rule: UpdateRule, entry: LogicalParam) -> bool:
    """Return whether a parameter has int8 moments."""
    return rule.states == "int8" and math.prod(entry.shape) >= MIN_QUANTIZED_NUMEL


def _piece_state_bytes(rule: UpdateRule, entry: LogicalParam, size: int, master_bytes: int) -> int:
    """Return the state bytes of `size` elements of a parameter, and of its row and column statistics."""
    value_bytes = max(master_bytes, 4)
    stats = local_matrix_stack(entry).num_row_column_stats if is_factored(rule, entry) else 0
    return _element_state_bytes(rule, entry, size, value_bytes) + stats * value_bytes


def _element_state_bytes(rule: UpdateRule, entry: LogicalParam, size: int, value_bytes: int) -> int:
    average = value_bytes * size if rule.ema else 0
    if rule.name == "adamw" and has_int8_state(rule, entry):
        return average + 2 * (size + 4 * -(-size // QUANTIZATION_BLOCK))
    if rule.name == "adamw" and rule.states == "bfloat16":
        return average + 4 * size
    num_states = 1 if resolve_momentum(rule) else 0
    if rule.name in ("adafactor", "sm3"):
        num_states += not is_factored(rule, entry)
    elif rule.name == "muon":
        num_states = 1 if is_muon_matrix(rule, entry.name, entry.shape) else 2
    else:
        num_states = {"adamw": 2, "lamb": 2, "lion": 1}.get(rule.name, num_states)
    return average + num_states * size * value_bytes
