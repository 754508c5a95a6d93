"""The named model sizes and what can be said of them without building them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from echelon.layout.faults import Fault, FaultError, did_you_mean

IGNORE = -100
"""A target that does not count; torch's cross-entropy leaves it out by default."""

FAMILIES = ("gpt", "llama", "conv")

KERNEL = 9
"""Weights of one 3 x 3 filter of the convolutional network."""

IMAGE_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a one-device model."""

    name: str
    """The name of the size, as in `model = "gpt2-124m"`."""
    family: str
    """gpt (learned positions, LayerNorm, GELU, biases), llama (RoPE, RMSNorm, SwiGLU) or conv (BatchNorm)."""
    layers: int
    """Blocks; for conv, convolutions, each of which halves the image."""
    width: int
    """Size of the hidden vectors; for conv, channels of the first convolution, doubled by each next one."""
    heads: int = 1
    """Query heads."""
    kv_heads: int = 1
    """Key and value heads; fewer than the query heads in grouped-query attention."""
    ffn: int = 1
    """Hidden size of the feed-forward part."""
    vocab: int
    """Different tokens; for conv, classes."""
    max_seq_len: int
    """Longest sequence; for conv, side of the square image."""
    tied: bool = False
    """Whether the head uses the embedding's matrix."""
    dropout: float = 0.0
    """Probability that dropout zeroes an element in training."""
    causal: bool = True
    """Whether a token sees only those before it; otherwise it sees all of its document."""

    def __post_init__(self) -> None:
        wrong = []
        if self.family not in FAMILIES:
            wrong.append(f"family is not one of {', '.join(FAMILIES)} (family={self.family}); use one of them")
        for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "max_seq_len"):
            if getattr(self, field) < 1:
                wrong.append(f"{field} is less than 1 ({field}={getattr(self, field)}); use 1 or more")
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout is not in [0, 1) (dropout={self.dropout}); use 0 to switch it off")
        if not wrong and self.width % self.heads:
            wrong.append(f"heads do not divide the width (width={self.width}, heads={self.heads}); change one of them")
        elif not wrong and self.family == "llama" and self.head_dim % 2:
            wrong.append(f"rotary positions need an even width per head (head_dim={self.head_dim}); change the heads")
        if not wrong and self.heads % self.kv_heads:
            wrong.append(f"kv_heads do not divide the heads (heads={self.heads}, kv_heads={self.kv_heads}); change one")
        if not wrong and self.family == "conv" and self.max_seq_len % 2**self.layers:
            wrong.append(
                f"{self.layers} convolutions cannot halve the image (max_seq_len={self.max_seq_len}); use fewer"
            )
        if wrong:
            raise ValueError(f"model {self.name!r}: " + "; also ".join(wrong))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Unique parameters, exactly."""
        if self.family == "conv":
            return sum(KERNEL * i * o + 2 * o for i, o in self.convolutions) + self._conv_head + self.vocab
        outside = self.vocab * self.width + (0 if self.tied else self.vocab * self.width)
        if self.family == "gpt":
            return outside + self.max_seq_len * self.width + self.layers * self._gpt_block + 2 * self.width
        return outside + self.layers * self._llama_block + self.width

    @property
    def matmul_parameters(self) -> int:
        """What MFU counts: the parameters without the input embedding and positions; a tied head counts, once."""
        if self.family == "conv":
            return self.parameters
        embedding = 0 if self.tied else self.vocab * self.width
        positions = self.max_seq_len * self.width if self.family == "gpt" else 0
        return self.parameters - embedding - positions

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a training step per token: 6 per matmul parameter, plus attention. For conv, per image."""
        if self.family == "conv":
            sides = (self.max_seq_len >> layer for layer in range(self.layers))
            products = (KERNEL * i * o * s * s for (i, o), s in zip(self.convolutions, sides, strict=True))
            return 6 * (self._conv_head + sum(products))
        return 6 * self.matmul_parameters + (6 if self.causal else 12) * self.layers * self.width * seq_len

    @property
    def convolutions(self) -> tuple[tuple[int, int], ...]:
        """Channels (in, out) of each convolution of the conv family."""
        sizes = (IMAGE_CHANNELS, *(self.width << layer for layer in range(self.layers)))
        return tuple(pairwise(sizes))

    @property
    def _conv_head(self) -> int:
        return (self.width << (self.layers - 1)) * self.vocab

    @property
    def _gpt_block(self) -> int:
        kv = self.kv_heads * self.head_dim
        attention = 2 * (self.width * self.width + self.width) + 2 * (self.width * kv + kv)
        mlp = 2 * self.width * self.ffn + self.ffn + self.width
        return attention + mlp + 4 * self.width

    @property
    def _llama_block(self) -> int:
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_dim
        return attention + 3 * self.width * self.ffn + 2 * self.width


def _gpt(name: str, layers: int, width: int, heads: int, *, vocab: int = 50257, seq: int = 1024) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="gpt",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocab=vocab,
        max_seq_len=seq,
        tied=True,
    )


def _llama(
    name: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, *, vocab: int = 128256, seq: int = 8192
) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        max_seq_len=seq,
    )


_TABLE = (
    _gpt("gpt-tiny", 4, 64, 4, vocab=257, seq=256),
    _gpt("gpt2-124m", 12, 768, 12),
    _gpt("gpt2-350m", 24, 1024, 16),
    _gpt("gpt2-774m", 36, 1280, 20),
    _gpt("gpt2-1.5b", 48, 1600, 25),
    _gpt("gpt3-175b", 96, 12288, 96, seq=2048),
    _llama("llama-tiny", 4, 64, 4, 2, 176, vocab=257, seq=256),
    _llama("llama-1b", 16, 2048, 32, 8, 8192),
    _llama("llama-3b", 28, 3072, 24, 8, 8192),
    _llama("llama-8b", 32, 4096, 32, 8, 14336),
    _llama("llama-70b", 80, 8192, 64, 8, 28672),
    _llama("llama-405b", 126, 16384, 128, 8, 53248),
    ModelConfig(name="conv-tiny", family="conv", layers=3, width=8, vocab=10, max_seq_len=16),
)

SIZES: Mapping[str, ModelConfig] = {config.name: config for config in _TABLE}


def find(name: str) -> ModelConfig:
    """The size with this name."""
    if name in SIZES:
        return SIZES[name]
    raise FaultError(
        (
            Fault(
                key="model",
                value=name,
                rule="is not the name of a model size",
                legal=", ".join(SIZES),
                hint=did_you_mean(name, SIZES),
            ),
        )
    )


def changed(config: ModelConfig, *, dropout: float | None, tied: bool | None, seq_len: int = 0) -> ModelConfig:
    """The size with what a configuration sets in place of its own; none keeps it.

    Rotary positions have no table, so that their models take sequences of any length.
    """
    rotary = config.family == "llama"
    return replace(
        config,
        max_seq_len=max(config.max_seq_len, seq_len) if rotary else config.max_seq_len,
        dropout=config.dropout if dropout is None else dropout,
        tied=config.tied if tied is None else tied,
    )


def reduced(
    config: ModelConfig, *, layers: int = 4, width: int = 64, heads: int = 4, vocab: int = 257, max_seq_len: int = 256
) -> ModelConfig:
    """A small model of the same kind: family, tied, dropout, and as near as can be the ratios of kv heads and ffn."""
    if config.family == "conv":
        return config
    ratio = config.heads / config.kv_heads
    divisors = [kv for kv in range(1, heads + 1) if heads % kv == 0]
    return replace(
        config,
        name=f"{config.name}-reduced",
        layers=min(layers, config.layers),
        width=width,
        heads=heads,
        kv_heads=min(divisors, key=lambda kv: abs(heads / kv - ratio)),
        ffn=-(-config.ffn * width // (config.width * 16)) * 16,
        vocab=min(vocab, config.vocab),
        max_seq_len=min(max_seq_len, config.max_seq_len),
    )
