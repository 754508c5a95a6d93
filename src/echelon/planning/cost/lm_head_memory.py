"""Bytes of the language head while it runs: logits, and the gradients that come of them."""

from __future__ import annotations

from echelon.planning.cost.param_group_traffic import gradient_bytes
from echelon.planning.scenario import Scenario

LOGIT_BYTES = 12
"""of a logit in the compute type and in 32 bits, and of its gradient likewise"""
LOSS_CHUNK_BYTES, MIN_CHUNK_TOKENS = 1 << 30, 256
"""of the logits that our loss has at a time, and rows of them at least (kernels/layers/cross_entropy.py)"""
LIVE_CHUNKS = 2
"""that are there at once, where there are several: the one before is let go when the next is made"""
NORM_TENSORS = 3
"""tensors of all tokens that are there: what the last norm reads, what it writes, and the gradient of that"""


def lm_head_bytes(scenario: Scenario, gradients_resident: bool) -> float:
    """At the head's fullest. `held`: its gradient has room of its own throughout, and is counted there."""
    vocab, width, size = scenario.shape.vocab, scenario.shape.width, scenario.element_bytes
    if not (scenario.has_kernels and scenario.layout.tp == 1):
        last_norm = NORM_TENSORS * scenario.tokens * width * size / scenario.sp_degree if scenario.is_unfused else 0.0
        return scenario.tokens * vocab / scenario.layout.tp * LOGIT_BYTES + last_norm
    rows = loss_chunk_tokens(vocab, size)
    several = scenario.tokens > rows
    hidden = scenario.tokens * width * size
    of_weight = vocab * width * (4 if several else size)
    chunks = min(scenario.tokens, LIVE_CHUNKS * rows) * vocab * size
    # Backward hands both gradients on, times that of the loss: the weight's to its place.
    handed = hidden + (0 if gradients_resident else vocab * width * gradient_bytes(scenario))
    return NORM_TENSORS * hidden + of_weight + max(chunks, handed)


def loss_chunk_tokens(vocab: int, element_bytes: int) -> int:
    """As kernels/layers/cross_entropy.py has it, which loads torch."""
    fitting = max(LOSS_CHUNK_BYTES // (vocab * element_bytes), MIN_CHUNK_TOKENS)
    return 1 << (fitting.bit_length() - 1)
