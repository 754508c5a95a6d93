"""Rotary positions of models that were trained on short sequences first, and on long ones after (Llama 3.1). No torch.

turns of a pair in the first length      rate
high or more                             as it was
low or less                              divided by the factor
between                                  in proportion
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slow pairs turn more slowly."""

    factor: float
    """How much more slowly."""
    low_freq_factor: float
    """Turns in the first length up to which a pair is slow."""
    high_freq_factor: float
    """Turns in the first length from which a pair stays as it was."""
    original_max_seq_len: int
    """The first length, in tokens."""

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (self.factor >= 1 and 0 < low < high and self.original_max_seq_len >= 1):
            raise ValueError(
                "rope_scaling requires factor >= 1, 0 < low_freq_factor < high_freq_factor and "
                f"original_max_seq_len >= 1 ({self})"
            )
