"""What comes and goes while the backward of one of our layers runs, beside what the forward pass kept.

[Note: inside a mixture's backward]

Rows are as wide as the model (w) or as what is inside their experts (f; what `up` gives is 2f with a gate). Each moment
has its own tensors, and has let go of what those before it read:

    moment               is there                                        is no longer there    gradients of experts
    results are weighed  gradients, weighed and times the results: 3w    -                     none
    down's gradients     of its output w, of its input f, its weight's   results w             none
    these are put away   of its input f, its weight's                    w, activation f       there
    the activation       of its output f, of its input 2f                w, f                  there
    up's gradients       of its output 2f, of its input w, its weight's  w, f, up's output 2f  there

A weight's gradient is made whole and then put in its place (flat_unit.py), for which there may be no memory before:
then it is not there at the first two. Beside all of these is the gradient of the stream, before and after.
"""

from __future__ import annotations

from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.planning.cost.activation_memory import saved_tensor_bytes
from echelon.planning.cost.param_group_traffic import gradient_bytes
from echelon.planning.model.model_shape import COLUMN_PARALLEL, LayerShape
from echelon.planning.scenario import Scenario

WORKING_RATIO = 0.45
"""times the activations of a layer that its backward needs while it runs, where our kernels do: the gradients of what
the activation reads are the most of it"""
UNFUSED_WORKING_RATIO = 0.32
"""the same where torch's own operators run: measured on a processor (tests/planning/test_recomputing.py)"""
SCORE_WORKING_BYTES = 38
"""bytes of a score that come and go where scores are written out: its gradient before and after dropout and softmax,
in two types, and what these read. What lies behind attention in the layer has gone by then"""
RESIDUAL_GRADIENTS = 2


def backward_bytes(scenario: Scenario, layer: LayerShape, *, gradients_resident: bool) -> float:
    """Bytes at its fullest. `held`: gradients have memory throughout."""
    written = _score_backward_bytes(scenario, layer)
    if not layer.is_moe or not scenario.has_kernels:
        return max(
            (WORKING_RATIO if scenario.has_kernels else UNFUSED_WORKING_RATIO) * saved_tensor_bytes(scenario, layer),
            written,
        )
    layout, size = scenario.layout, scenario.element_bytes
    up, down = sorted(
        (product for product in layer.matmuls if product.experts), key=lambda one: one.split != COLUMN_PARALLEL
    )
    ranks = layout.ep * layout.etp
    home = scenario.tokens * size * up.token_share / layout.tp
    rows = min(scenario.expert_load, MAX_LOAD_FACTOR) * home * layout.etp
    width, inner, both = up.inputs, down.inputs / layout.etp, up.outputs / layout.etp
    missing = 0.0 if gradients_resident else layer.expert_parameters / ranks * gradient_bytes(scenario)
    down_weight, up_weight = (product.parameters * size / ranks for product in (down, up))
    moments = (
        (2 * home + max(home, rows)) * width - missing,
        rows * (width + inner) + down_weight - home * width - missing,
        down_weight - home * width,
        rows * both - home * width,
        rows * (width - inner) + up_weight - home * width,
    )
    return max(moments) + RESIDUAL_GRADIENTS * scenario.tokens * scenario.shape.width * size / scenario.sp_degree


def _score_backward_bytes(scenario: Scenario, layer: LayerShape) -> float:
    """While attention goes backward, where scores are written out."""
    attention = layer.attention
    if not scenario.materializes_scores or attention is None:
        return 0.0
    own = attention.heads * (attention.head_dim + 2 * attention.value_dim)
    own += attention.kv_heads * (attention.head_dim + attention.value_dim)
    before = (
        scenario.element_bytes
        * scenario.tokens
        * (own / scenario.layout.tp + 3 * scenario.shape.width / scenario.sp_degree)
    )
    each = SCORE_WORKING_BYTES if scenario.shape.dropout else 3 * scenario.element_bytes
    found = each * attention.heads / scenario.layout.tp * scenario.tokens * scenario.seq_len
    return found - max(0.0, saved_tensor_bytes(scenario, layer) - before)
