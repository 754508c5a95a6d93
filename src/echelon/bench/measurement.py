"""`Measurement`: what one subprocess measures, as data that travels on its command line. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from echelon.bench.reference_shapes import reference_model
from echelon.models.model_config import ModelConfig

ECHELON = "echelon"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The framework, the model and the settings of one measured step."""

    who: str
    """`echelon`, or the name of a peer"""
    shape: str
    """the name of the reference shape"""
    size: str
    seq_len: int
    batch: int
    precision: str
    """of the matmuls: fp32, bf16, fp8, fp8-row"""
    recompute: str = "none"
    states: str = "float32"
    """the dtype of our optimizer's moments"""
    device: str = "cpu"
    """cuda or cpu"""
    warmup_steps: int = 4
    """before the first timed step"""
    timed_steps: int = 8
    peer_folder: str = ""
    """where to import peers from"""

    def __str__(self) -> str:
        return f"{self.shape}, {self.precision}, {self.who}"

    @property
    def settings(self) -> dict[str, Any]:
        """What results state of the measured step, by the names that they use."""
        names = ("shape", "batch", "precision", "recompute", "states")
        return {**{name: getattr(self, name) for name in names}, "seq": self.seq_len}

    @property
    def model(self) -> ModelConfig:
        return reference_model(self.size, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq_len * self.batch

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Measurement:
        return cls(**json.loads(line))
