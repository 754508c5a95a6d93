"""The reference shapes: models, sequence lengths and batches of the benchmark. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.models import model_config
from echelon.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ReferenceShape:
    """A model and the batch it trains on."""

    name: str
    size: str
    """the name of the model"""
    seq_len: int
    batch: int
    """sequences per step"""
    recompute: str = "none"
    """our activation checkpointing"""
    recompute_fp8: str = "ops"
    """the same with fp8 matmuls, which also save fp8 copies of their inputs"""
    peer_recompute: str = "none"
    """what a peer needs to fit on one device of 140 GiB"""

    @property
    def model(self) -> ModelConfig:
        return reference_model(self.size, self.seq_len)


REFERENCE_SHAPES = {
    shape.name: shape
    for shape in (
        ReferenceShape(name="tiny", size="llama-tiny", seq_len=128, batch=8),
        ReferenceShape(name="gpt2", size="gpt2-124m", seq_len=1024, batch=64),
        ReferenceShape(name="gpt2-x8", size="gpt2-124m", seq_len=1024, batch=8),
        ReferenceShape(name="gpt2-350m", size="gpt2-350m", seq_len=1024, batch=32),
        ReferenceShape(name="gpt2-1.5b", size="gpt2-1.5b", seq_len=1024, batch=16),
        ReferenceShape(name="1b", size="llama-1b", seq_len=4096, batch=8),
        ReferenceShape(name="3b", size="llama-3b", seq_len=4096, batch=4, recompute="ops"),
        ReferenceShape(name="8b", size="llama-8b", seq_len=8192, batch=1, recompute="ops", peer_recompute="full"),
    )
}
CPU_SHAPES, CUDA_SHAPES = ("tiny",), ("gpt2", "1b", "3b", "8b")
"""the default shapes"""


def reference_model(size: str, seq_len: int) -> ModelConfig:
    """A named model with at least this maximum sequence length: rotary positions allow any."""
    config = model_config.find_model(size)
    return replace(config, max_seq_len=max(config.max_seq_len, seq_len))
