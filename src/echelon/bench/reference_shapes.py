"""The reference shapes: models, sequences and batches on which steps are compared. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.models import model_config
from echelon.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the batch it trains on."""

    name: str
    size: str
    """the model's name among the sizes"""
    seq_len: int
    batch: int
    """sequences of a step"""
    recompute: str = "none"
    """what we compute again in backward"""
    recompute_fp8: str = "ops"
    """the same where products are in 8 bits: copies of what they read would come on top"""
    peer_recompute: str = "none"
    """what a peer has to compute again to fit on one device of 140 GiB"""

    @property
    def model(self) -> ModelConfig:
        return model_of(self.size, self.seq_len)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="tiny", size="llama-tiny", seq_len=128, batch=8),
        Shape(name="1b", size="llama-1b", seq_len=4096, batch=8),
        Shape(name="3b", size="llama-3b", seq_len=4096, batch=4, recompute="ops"),
        Shape(name="8b", size="llama-8b", seq_len=8192, batch=1, recompute="ops", peer_recompute="full"),
    )
}
ON_CPU, ON_CUDA = ("tiny",), ("1b", "3b", "8b")
"""those that are measured where none is named"""


def model_of(size: str, seq_len: int) -> ModelConfig:
    """The named size, for sequences of this length: rotary positions have no end."""
    found = model_config.find(size)
    return replace(found, max_seq_len=max(found.max_seq_len, seq_len))
