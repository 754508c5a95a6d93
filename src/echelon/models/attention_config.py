"""What is said of a model's latent attention. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """DeepSeek's attention: queries, keys and values are made of narrow vectors (latent.py)."""

    query_rank: int = 0
    """Elements of the vector that a token's queries are made of; 0: they are made of the hidden vector itself."""
    kv_rank: int
    """Elements of the vector that its keys and values are made of."""
    rope_dim: int
    """Of each head's query and key, the elements that turn with the position. All heads' keys share them."""
    nope_dim: int
    """Of each head's query and key, those that do not."""
    value_dim: int
    """Elements of each head's value."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is less than {least} ({name}={getattr(self, name)}); use {least} or more"
            for name, least in (("query_rank", 0), ("kv_rank", 1), ("rope_dim", 2), ("nope_dim", 1), ("value_dim", 1))
            if getattr(self, name) < least
        ]
        if self.rope_dim % 2:
            wrong.append(f"rotary positions turn pairs (rope_dim={self.rope_dim}); use an even number")
        if self.value_dim > self.head_dim:
            # Where keys and values travel together, the narrower ones are padded: these are always the values.
            wrong.append(f"values are wider than queries (value_dim={self.value_dim}, queries {self.head_dim})")
        if wrong:
            raise ValueError("latent attention: " + "; also ".join(wrong))

    @property
    def head_dim(self) -> int:
        """Of a query and of a key."""
        return self.nope_dim + self.rope_dim

    def parameters(self, width: int, heads: int) -> int:
        """Of one layer, the norms of the narrow vectors among them."""
        queries = heads * self.head_dim
        query = (width + 1 + queries) * self.query_rank if self.query_rank else width * queries
        down = width * (self.kv_rank + self.rope_dim)
        up = self.kv_rank * (1 + heads * (self.nope_dim + self.value_dim))
        return query + down + up + heads * self.value_dim * width

    def reduced(self, nope_dim: int) -> MLAConfig:
        """With heads of this size, and the rest in about DeepSeek's proportions to it."""
        half = max(nope_dim // 4 * 2, 2)
        return MLAConfig(
            query_rank=2 * nope_dim if self.query_rank else 0,
            kv_rank=nope_dim + half,
            rope_dim=half,
            nope_dim=nope_dim,
            value_dim=nope_dim,
        )


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
