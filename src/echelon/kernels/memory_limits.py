"""Sizes of the kernels' buffers. No torch.

The planner counts the bytes that kernels allocate, so it uses the same sizes.
"""

from __future__ import annotations

MAX_PENDING_BYTES = 512 << 20
"""of partial attention results that wait to be merged"""
MAX_PENDING = 8
"""partial attention results that wait to be merged; a kernel is compiled for each number"""
LOSS_CHUNK_BYTES = 1 << 30
"""of the logits that the fused loss computes at a time; GEMMs of fewer tokens are slower"""
TORCH_LOGIT_BYTES = 16
"""of a logit in torch's operators: in 16 bits and in 32, its probability, its gradient in 32 bits and in 16"""
MIN_CHUNK_TOKENS = 256
"""tokens of a chunk of logits, at least"""
SCALE_BLOCK = 256
"""elements of a saved activation that share a scale, or a count of nonzero values"""


def tokens_per_chunk(vocab_size: int, element_bytes: int) -> int:
    """Return the tokens whose logits the fused loss computes at a time, a power of two.

    >>> tokens_per_chunk(128_256, 2)
    4096
    """
    fitting = max(LOSS_CHUNK_BYTES // (vocab_size * element_bytes), MIN_CHUNK_TOKENS)
    return 1 << (fitting.bit_length() - 1)
