"""Memory that comes and goes: of a layer's backward, and of the language-model head with its loss.

[Note: inside the backward of an MoE layer]

Tokens are as wide as the model (w) or as the inside of their experts (f; the output of `up` is 2f with a gate). Each
phase has tensors of its own, and has freed those that the phases before it read:

    phase                 allocated                                          freed                 expert gradients
    results are scaled    gradients, scaled and times the results: 3w        -                     none
    down's backward       gradient of its output w, input f, weight          results w             none
    its gradient is put   gradient of its input f, weight                    w, activation f       all
    away
    the activation        gradient of its output f, input 2f                 w, f                  all
    up's backward         gradient of its output 2f, input w, weight         w, f, up's output 2f  all

A grouped GEMM computes the full gradient of a weight, which is then copied into its buffer (param_group.py). If that
buffer is allocated lazily, it is missing in the first two phases. On top come the gradients of the residual stream,
before and after.
"""

from __future__ import annotations

import math

from echelon.kernels.memory_limits import TORCH_LOGIT_BYTES, tokens_per_chunk
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.activation_memory import saved_tensor_bytes
from echelon.planning.cost.program_memory import program_memory
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ChunkedLoss, LayerShape
from echelon.planning.scenario import Scenario

WORKING_RATIO = 0.45
"""memory of a layer's backward over its saved activations, with Echelon's kernels: mostly gradients of what the
activation reads"""
UNFUSED_WORKING_RATIO = 0.32
"""the same with torch's operators: measured on a CPU (tests/planning/test_recompute_cost.py)"""
SCORE_WORKING_BYTES = 38
"""per materialized score: its gradient before and after dropout and softmax, in two dtypes, and what these read. The
tensors behind attention in the layer are freed by then"""
RESIDUAL_GRADIENTS = 2
LOGIT_BYTES = 12
"""of a logit in the compute dtype and in float32, and of its gradient likewise"""
LIVE_CHUNKS = 2
"""chunks of logits at once, if there are several: the old one is freed when the next is computed"""
NORM_TENSORS = 3
"""tensors of all tokens: input and output of the last norm, and the gradient of the latter"""


def backward_bytes(scenario: Scenario, layer: LayerShape, *, gradients_resident: bool) -> float:
    """Peak bytes of a layer's backward; `gradients_resident`: gradient buffers are allocated throughout."""
    if not layer.is_moe or not scenario.has_kernels:
        ratio = WORKING_RATIO if scenario.has_kernels else UNFUSED_WORKING_RATIO
        return max(ratio * saved_tensor_bytes(scenario, layer), _score_backward_bytes(scenario, layer))
    layout, size = scenario.layout, scenario.element_bytes
    matmuls = [matmul for matmul in layer.matmuls if matmul.experts]
    up, down = sorted(matmuls, key=lambda matmul: matmul.split != COLUMN_PARALLEL)
    ranks = layout.ep * layout.etp
    local = scenario.tokens * size * up.token_share / layout.tp  # bytes per element of width, of this rank's tokens
    routed = min(scenario.expert_load, MAX_LOAD_FACTOR) * local * layout.etp  # of the tokens that its experts receive
    width, inner, up_outputs = up.inputs, down.inputs / layout.etp, up.outputs / layout.etp
    missing = 0.0 if gradients_resident else layer.expert_parameters / ranks * scenario.gradient_bytes
    down_weight, up_weight = (matmul.parameters * size / ranks for matmul in (down, up))
    phases = (
        (2 * local + max(local, routed)) * width - missing,
        routed * (width + inner) + down_weight - local * width - missing,
        down_weight - local * width,
        routed * up_outputs - local * width,
        routed * (width - inner) + up_weight - local * width,
    )
    return max(phases) + RESIDUAL_GRADIENTS * scenario.tokens * scenario.shape.width * size / scenario.sp_degree


def _score_backward_bytes(scenario: Scenario, layer: LayerShape) -> float:
    """Peak bytes of attention's backward, if scores are materialized."""
    attention = layer.attention
    if not scenario.materializes_scores or attention is None:
        return 0.0
    tp, tokens, size = scenario.layout.tp, scenario.tokens, scenario.element_bytes
    elements = attention.heads * (attention.head_dim + 2 * attention.value_dim)
    elements += attention.kv_heads * (attention.head_dim + attention.value_dim)
    saved_before = size * tokens * (elements / tp + 3 * scenario.shape.width / scenario.sp_degree)
    score_bytes = SCORE_WORKING_BYTES if scenario.shape.dropout else 3 * size
    scores = score_bytes * attention.heads / tp * tokens * scenario.seq_len
    return scores - max(0.0, saved_tensor_bytes(scenario, layer) - saved_before)


def lm_head_bytes(scenario: Scenario, gradients_resident: bool, c: Constants = FITTED_CONSTANTS) -> float:
    """Peak bytes of the head and its loss; a resident gradient buffer of the head is counted elsewhere."""
    vocab, width, size, tokens = scenario.shape.vocab, scenario.shape.width, scenario.element_bytes, scenario.tokens
    if scenario.is_own and scenario.shape.loss is not None:
        return _chunked_head_bytes(scenario, scenario.shape.loss, gradients_resident)
    if not (scenario.has_kernels and scenario.layout.tp == 1):
        last_norm = NORM_TENSORS * tokens * width * size / scenario.sp_degree if scenario.is_unfused else 0.0
        logit_bytes = LOGIT_BYTES if scenario.is_own else program_memory(scenario, c).logit_bytes
        return tokens * vocab / scenario.layout.tp * logit_bytes + last_norm
    chunk_tokens = tokens_per_chunk(vocab, size)
    hidden = tokens * width * size
    weight_gradient = vocab * width * (4 if tokens > chunk_tokens else size)
    chunks = min(tokens, LIVE_CHUNKS * chunk_tokens) * vocab * size
    # Backward scales both gradients by the loss's; the weight's goes to its buffer.
    scaled = hidden + (0 if gradients_resident else vocab * width * scenario.gradient_bytes)
    return NORM_TENSORS * hidden + weight_gradient + max(chunks, scaled)


def _chunked_head_bytes(scenario: Scenario, loss: ChunkedLoss, gradients_resident: bool) -> float:
    """The same of a loss that torch's operators compute some tokens at a time."""
    tokens, size, rows = scenario.tokens, scenario.element_bytes, scenario.shape.vocab / scenario.layout.tp
    words = rows if loss.divides_vocab else scenario.shape.vocab
    chunk_tokens = tokens_per_chunk(math.ceil(words), TORCH_LOGIT_BYTES)
    hidden = tokens * scenario.shape.width * size
    weight_gradient = rows * scenario.shape.width * (4 if tokens > chunk_tokens else size)
    scaled = hidden + (0 if gradients_resident else rows * scenario.shape.width * scenario.gradient_bytes)
    return NORM_TENSORS * hidden + weight_gradient + max(min(tokens, chunk_tokens) * words * TORCH_LOGIT_BYTES, scaled)
