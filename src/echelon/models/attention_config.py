"""Configuration of latent attention (MLA) and of RoPE scaling. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """DeepSeek's multi-head latent attention (mla.py)."""

    query_rank: int = 0
    """Size of the latent of queries; 0: queries are projected from the hidden state."""
    kv_rank: int
    """Size of the latent of keys and values."""
    rope_dim: int
    """Elements of each head's query and key that RoPE rotates; the keys of all heads share them."""
    nope_dim: int
    """Elements of each head's query and key that RoPE does not rotate."""
    value_dim: int
    """Elements of each head's value."""

    def __post_init__(self) -> None:
        errors = [
            f"{name} is less than {least} ({name}={getattr(self, name)}); use {least} or more"
            for name, least in (("query_rank", 0), ("kv_rank", 1), ("rope_dim", 2), ("nope_dim", 1), ("value_dim", 1))
            if getattr(self, name) < least
        ]
        if self.rope_dim % 2:
            errors.append(f"RoPE rotates pairs (rope_dim={self.rope_dim}); use an even number")
        if self.value_dim > self.head_dim:
            # Context parallelism sends keys and values together and pads the values.
            errors.append(f"values are wider than queries (value_dim={self.value_dim}, queries {self.head_dim})")
        if errors:
            raise ValueError("latent attention: " + "; also ".join(errors))

    @property
    def head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def parameters(self, width: int, heads: int) -> int:
        """Parameters of one layer, with the norms of the latents."""
        queries = heads * self.head_dim
        query = (width + 1 + queries) * self.query_rank if self.query_rank else width * queries
        down = width * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * (1 + heads * (self.nope_dim + self.value_dim))
        return query + down + up + heads * self.value_dim * width


class RopeScaling:
    """How RoPE changes for sequences longer than those of pre-training. Its variants are the dataclasses below.

    Their fields are the keys of Hugging Face's `rope_scaling`, but for `HF_ROPE_KEYS`.
    """

    kind: ClassVar[str]
    """its `rope_type`"""

    @property
    def rotation_scale(self) -> float:
        """Factor of every cosine and sine."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """Factor of the scores of latent attention."""
        return 1.0

    def scale(self, rates: Any, theta: float) -> Any:
        """Scale the frequencies, a tensor [head_dim / 2], in radians per token."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling(RopeScaling):
    """Chen et al. 2023, position interpolation: every frequency is divided by the factor."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling requires a finite factor >= 1 ({self})")

    def scale(self, rates: Any, theta: float) -> Any:
        return rates / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling(RopeScaling):
    """Llama 3.1's scaling.

    rotations of a pair within original_max_seq_len      its frequency is
    high_freq_factor or more                             unchanged
    low_freq_factor or less                              divided by the factor
    between                                              interpolated
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (1 <= self.factor < math.inf and 0 < low < high < math.inf and self.original_max_seq_len >= 1):
            raise ValueError(
                "rope_scaling requires a finite factor >= 1, 0 < low_freq_factor < high_freq_factor and "
                f"original_max_seq_len >= 1 ({self})"
            )

    def scale(self, rates: Any, theta: float) -> Any:
        turns = self.original_max_seq_len * rates / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return rates * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling(RopeScaling):
    """YaRN (Peng et al. 2023), with DeepSeek's mscale.

    A pair's index decides, by how often it turns within original_max_seq_len: above beta_fast turns its frequency
    is unchanged, below beta_slow it is divided by the factor, with a linear ramp over the indices in between. Attention
    over longer sequences is sharper: m(x) = 0.1 x ln(factor) + 1 scales

        cosines and sines     by attention_factor, or m(mscale) / m(mscale_all_dim) if both are given, otherwise m(1)
        scores                of latent attention by m(mscale_all_dim)^2, if it is given
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    """0: from the factor"""
    truncate: bool = True
    """whether the ramp begins and ends at whole indices"""

    def __post_init__(self) -> None:
        in_range = 1 <= self.factor < math.inf and 0 < self.beta_slow < self.beta_fast < math.inf
        scales = (self.mscale, self.mscale_all_dim, self.attention_factor)
        if not (in_range and self.original_max_seq_len >= 1 and all(0 <= scale < math.inf for scale in scales)):
            raise ValueError(
                "rope_scaling requires factor >= 1, 0 < beta_slow < beta_fast, original_max_seq_len >= 1, and mscale, "
                f"mscale_all_dim and attention_factor >= 0 ({self})"
            )

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotation_scale(self) -> float:
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_scale(self) -> float:
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def scale(self, rates: Any, theta: float) -> Any:
        dim = 2 * len(rates)

        def index_of(turns: float) -> float:
            """The index of the pair that turns so often."""
            return dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = (rates.new_tensor(range(len(rates))) - first) / (last - first or 0.001)
        return rates * (1 - ramp.clamp(0, 1) * (1 - 1 / self.factor))


ROPE_SCALINGS: Mapping[str, type[RopeScaling]] = {
    variant.kind: variant for variant in (LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling)
}
"""by `rope_type`"""
HF_ROPE_KEYS = {"original_max_seq_len": "original_max_position_embeddings"}
"""fields of the variants that Hugging Face names otherwise"""
