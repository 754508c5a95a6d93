"""Bytes of the language head while it runs: logits, and the gradients that come of them."""

from __future__ import annotations

from echelon.planning.cost.param_group_traffic import gradient_bytes
from echelon.planning.scenario import Case

LOGIT_BYTES = 12
"""of a logit in the compute type and in 32 bits, and of its gradient likewise"""
CHUNK_BYTES, FEWEST_ROWS = 1 << 30, 256
"""of the logits that our loss has at a time, and rows of them at least (kernels/layers/cross_entropy.py)"""
CHUNKS = 2
"""that are there at once, where there are several: the one before is let go when the next is made"""
NORMED = 3
"""tensors of all tokens that are there: what the last norm reads, what it writes, and the gradient of that"""


def head_bytes(case: Case, held: bool) -> float:
    """At the head's fullest. `held`: its gradient has room of its own throughout, and is counted there."""
    vocab, width, size = case.shape.vocab, case.shape.width, case.element_bytes
    if not (case.has_kernels and case.layout.tp == 1):
        last_norm = NORMED * case.tokens * width * size / case.sliced if case.is_plain else 0.0
        return case.tokens * vocab / case.layout.tp * LOGIT_BYTES + last_norm
    rows = chunk_rows(vocab, size)
    several = case.tokens > rows
    hidden = case.tokens * width * size
    of_weight = vocab * width * (4 if several else size)
    chunks = min(case.tokens, CHUNKS * rows) * vocab * size
    # Backward hands both gradients on, times that of the loss: the weight's to its place.
    handed = hidden + (0 if held else vocab * width * gradient_bytes(case))
    return NORMED * hidden + of_weight + max(chunks, handed)


def chunk_rows(vocab: int, element_bytes: int) -> int:
    """As kernels/layers/cross_entropy.py has it, which loads torch."""
    fitting = max(CHUNK_BYTES // (vocab * element_bytes), FEWEST_ROWS)
    return 1 << (fitting.bit_length() - 1)
