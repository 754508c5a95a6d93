"""Configuration of latent attention (MLA) and of RoPE scaling. No torch."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of RoPE for sequences longer than those of pre-training.

    rotations of a pair within original_max_seq_len      its frequency is
    high_freq_factor or more                             unchanged
    low_freq_factor or less                              divided by the factor
    between                                              interpolated
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int
    """Tokens."""

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (self.factor >= 1 and 0 < low < high and self.original_max_seq_len >= 1):
            raise ValueError(
                "rope_scaling requires factor >= 1, 0 < low_freq_factor < high_freq_factor and "
                f"original_max_seq_len >= 1 ({self})"
            )
