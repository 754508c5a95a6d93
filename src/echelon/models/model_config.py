"""`ModelConfig`, the configuration of a model that we build; its parameters and FLOPs; the named sizes. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.models.attention_config import MLAConfig, RopeScaling
from echelon.models.model_spec import ModelSpec, MoESpec
from echelon.models.moe_config import MoEConfig, override_gate

IGNORE_INDEX = -100
"""A target that does not count; torch's cross-entropy leaves it out by default."""

FAMILIES = ("gpt", "llama", "conv")

KERNEL_WEIGHTS = 9
"""Weights of one 3 x 3 filter of the convolutional network."""

IMAGE_CHANNELS = 3

MAX_LAYERS = 10_000
"""blocks, which planning and building visit one by one: an input with more is a mistake"""

ROPE_THETA = 500_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a model."""

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
    """Whether the head shares the embedding's weight."""
    dropout: float = 0.0
    """Probability that dropout zeroes an element in training."""
    causal: bool = True
    """Whether attention is causal; otherwise a token attends to its full document."""
    moe: MoEConfig | None = None
    """MoE layers in place of some dense ones."""
    mla: MLAConfig | None = None
    """Multi-head latent attention (llama)."""
    explicit_head_dim: int = 0
    """Head dim where it is not width / heads; 0: it is (llama)."""
    qk_norm: bool = False
    """Whether RMSNorm normalises each head's queries and keys (llama)."""
    qkv_bias: bool = False
    """Whether the q, k and v projections have biases, as in Qwen2 (llama)."""
    theta: float = ROPE_THETA
    """Base of RoPE's frequencies (llama)."""
    epsilon: float = NORM_EPSILON
    """Epsilon of norms."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling for longer sequences than those of pre-training (llama)."""

    def __post_init__(self) -> None:
        errors, heads, kv_heads, side = [], self.heads, self.kv_heads, self.max_seq_len
        if self.family not in FAMILIES:
            errors.append(f"family is not one of {', '.join(FAMILIES)} (family={self.family}); use one of them")
        errors += self._size_errors()
        errors += self._llama_option_errors()
        if self.mla and heads != kv_heads:
            values = f"heads={heads}, kv_heads={kv_heads}"
            errors.append(f"latent attention requires kv_heads = heads ({values}); make them equal")
        if not 0 <= self.dropout < 1:
            errors.append(f"dropout is not in [0, 1) (dropout={self.dropout}); use 0 to switch it off")
        if not errors and self.width % heads and not (self.mla or self.explicit_head_dim):
            errors.append(f"heads do not divide the width (width={self.width}, heads={heads}); change one of them")
        elif not errors and self.family == "llama" and self.head_dim % 2:
            errors.append(f"RoPE requires an even head_dim (head_dim={self.head_dim}); change the heads")
        if not errors and heads % kv_heads:
            errors.append(f"kv_heads do not divide the heads (heads={heads}, kv_heads={kv_heads}); change one")
        if not errors and self.family == "conv" and side % 2**self.layers:
            errors.append(f"{self.layers} convolutions cannot halve the image (max_seq_len={side}); use fewer")
        if errors:
            raise ValueError(f"model {self.name!r}: " + "; also ".join(errors))

    def _llama_option_errors(self) -> list[str]:
        errors = []
        for field in ("mla", "qk_norm", "qkv_bias", "rope_scaling", "explicit_head_dim"):
            given = getattr(self, field)
            if given and self.family != "llama":
                errors.append(f"{field} is an option of the llama family (family={self.family}); leave it out")
            elif given and field not in ("mla", "rope_scaling") and self.mla:
                errors.append(f"{field} is incompatible with latent attention ({field}={given}); leave it out")
        if self.rope_scaling and not self.theta > 1:
            errors.append(f"rope_scaling requires frequencies that differ (theta={self.theta}); use theta above 1")
        return errors

    def _size_errors(self) -> Iterator[str]:
        for field in ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "max_seq_len"):
            if getattr(self, field) < 1:
                yield f"{field} is less than 1 ({field}={getattr(self, field)}); use 1 or more"
        if self.layers > MAX_LAYERS:
            yield f"layers exceed the limit of {MAX_LAYERS:,} (layers={self.layers}); use fewer"

    @property
    def head_dim(self) -> int:
        """Head dim of queries and keys."""
        return self.mla.head_dim if self.mla else self.explicit_head_dim or self.width // self.heads

    @property
    def value_dim(self) -> int:
        """Head dim of values."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def parameters(self) -> int:
        """Unique parameters, exactly."""
        if self.family == "conv":
            convolutions = sum(KERNEL_WEIGHTS * i * o + 2 * o for i, o in self.convolutions)
            return convolutions + self._conv_head_parameters + self.vocab
        gpt, mlp = self.family == "gpt", self._mlp_parameters(self.ffn)
        norm = (2 if gpt else 1) * self.width
        total = (1 if self.tied else 2) * self.vocab * self.width + (self.max_seq_len * self.width if gpt else 0) + norm
        total += self.layers * (self._attention_parameters + mlp + 2 * norm)
        if self.moe is not None:
            shared = self._mlp_parameters(self.moe.shared_ffn) if self.moe.shared_ffn else 0
            total += self.num_moe_layers * (self.moe.parameters(self.width) + shared - mlp)
        return total

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers."""
        return sum(self.moe.is_moe_layer(layer) for layer in range(self.layers)) if self.moe else 0

    @property
    def matmul_parameters(self) -> int:
        """Parameters that MFU counts: without the input embedding and positions, with the head, tied or not.

        Of routed experts only those of one token.
        """
        if self.family == "conv":
            return self.parameters
        embedding = 0 if self.tied else self.vocab * self.width
        positions = self.max_seq_len * self.width if self.family == "gpt" else 0
        return self.parameters - embedding - positions - self.idle_parameters

    @property
    def idle_parameters(self) -> int:
        """Parameters of routed experts that one token does not use."""
        if self.moe is None:
            return 0
        return round(self.num_moe_layers * (self.moe.parameters(self.width) - self.moe.active_parameters(self.width)))

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of a training step per token: 6 per matmul parameter, plus attention. For conv, per image."""
        if self.family == "conv":
            sides = (self.max_seq_len >> layer for layer in range(self.layers))
            macs = (KERNEL_WEIGHTS * i * o * s * s for (i, o), s in zip(self.convolutions, sides, strict=True))
            return 6 * (self._conv_head_parameters + sum(macs))
        scores_and_values = self.layers * self.heads * (self.head_dim + self.value_dim) * seq_len
        return 6 * self.matmul_parameters + (3 if self.causal else 6) * scores_and_values

    @property
    def spec(self) -> ModelSpec:
        """What cost functions and the planner read. The conv family has none."""
        if self.family == "conv":
            raise ValueError(f"a convolutional network has no transformer spec (model={self.name})")
        gpt, mla = self.family == "gpt", self.mla
        norms = mla.query_rank + mla.kv_rank if mla else 2 * self.head_dim if self.qk_norm else 0
        return ModelSpec(
            name=self.name,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            gated_mlp=not gpt,
            vocab=self.vocab,
            max_seq_len=self.max_seq_len,
            tied=self.tied,
            causal=self.causal,
            biases=gpt,
            dropout=self.dropout > 0,
            learned_positions=gpt,
            mla=mla,
            moe=self._moe_spec(self.moe) if self.moe is not None else None,
            extra_parameters=norms + (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias,
        )

    def _moe_spec(self, moe: MoEConfig) -> MoESpec:
        return MoESpec(
            experts=moe.experts,
            top_k=round(moe.k),
            ffn=moe.ffn,
            gated=moe.activation == "swiglu",
            shared_ffn=moe.shared_ffn,
            layers=tuple(moe.is_moe_layer(layer) for layer in range(self.layers)),
        )

    @property
    def convolutions(self) -> tuple[tuple[int, int], ...]:
        """Channels (in, out) of each convolution of the conv family."""
        sizes = (IMAGE_CHANNELS, *(self.width << layer for layer in range(self.layers)))
        return tuple(pairwise(sizes))

    @property
    def _conv_head_parameters(self) -> int:
        return (self.width << (self.layers - 1)) * self.vocab

    @property
    def _attention_parameters(self) -> int:
        if self.mla:
            return self.mla.parameters(self.width, self.heads)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = q + self.width + 2 * kv if self.family == "gpt" else (q + 2 * kv) * self.qkv_bias
        norms = 2 * self.head_dim if self.qk_norm else 0
        return 2 * self.width * q + 2 * self.width * kv + biases + norms

    def _mlp_parameters(self, ffn: int) -> int:
        if self.family == "gpt":
            return 2 * self.width * ffn + ffn + self.width
        return 3 * self.width * ffn


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


def _gpt(name: str, layers: int, width: int, heads: int, *, vocab: int = 50257, seq: int = 1024) -> ModelConfig:
    return replace(_llama(name, layers, width, heads, heads, 4 * width, vocab=vocab, seq=seq), family="gpt", tied=True)


def _tiny_llama(name: str, kv_heads: int = 2) -> ModelConfig:
    return _llama(name, 4, 64, 4, kv_heads, 176, vocab=257, seq=256)


def _tiny_gpt(name: str) -> ModelConfig:
    return _gpt(name, 4, 64, 4, vocab=257, seq=256)


def _switch(experts: int, ffn: int) -> MoEConfig:
    return MoEConfig(experts=experts, k=1, ffn=ffn, gate="switch", activation="relu", every=2)


def _deepseek(
    config: ModelConfig, mla: MLAConfig, moe: MoEConfig, groups: tuple[int, int], scale: float
) -> ModelConfig:
    """`groups` of experts, and how many of them a token may choose."""
    options = (("num_groups", groups[0]), ("group_limit", groups[1]), ("scale", scale))
    return replace(config, mla=mla, moe=replace(moe, options=options), theta=1e4, epsilon=1e-6)


_DEEPSEEK_MLA = MLAConfig(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)

_TABLE = (
    _tiny_gpt("gpt-tiny"),
    _gpt("gpt2-124m", 12, 768, 12),
    _gpt("gpt2-350m", 24, 1024, 16),
    _gpt("gpt2-774m", 36, 1280, 20),
    _gpt("gpt2-1.5b", 48, 1600, 25),
    _gpt("gpt3-175b", 96, 12288, 96, seq=2048),
    _tiny_llama("llama-tiny"),
    _llama("llama-1b", 16, 2048, 32, 8, 8192),
    _llama("llama-3b", 28, 3072, 24, 8, 8192),
    _llama("llama-8b", 32, 4096, 32, 8, 14336),
    _llama("llama-70b", 80, 8192, 64, 8, 28672),
    _llama("llama-405b", 126, 16384, 128, 8, 53248),
    replace(_tiny_llama("moe-tiny"), moe=MoEConfig(experts=8, k=2, ffn=88, gate="mixtral")),
    replace(_tiny_gpt("switch-tiny"), moe=_switch(8, 256)),
    # In the paper's order of capacity slots, later tokens could displace earlier ones.
    replace(_tiny_gpt("gshard-tiny"), moe=replace(_switch(8, 256), k=2, gate="gshard", options=(("order", "tokens"),))),
    replace(_tiny_llama("qwen-moe-tiny"), moe=MoEConfig(experts=16, k=4, ffn=32, gate="qwen", shared_ffn=64)),
    _deepseek(
        _tiny_llama("deepseek-tiny", 4),
        MLAConfig(query_rank=32, kv_rank=24, rope_dim=8, nope_dim=16, value_dim=12),
        MoEConfig(experts=16, k=4, ffn=32, gate="deepseek-v3", shared_ffn=32, dense_layers=1),
        groups=(4, 2),
        scale=2.5,
    ),
    # The published switch-base-8 has T5's encoder and decoder; this is a decoder alone, of GPT's blocks of its size.
    replace(_gpt("switch-base-8", 12, 768, 12, vocab=32128, seq=512), moe=_switch(8, 3072)),
    replace(
        _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, vocab=32000, seq=32768),
        moe=MoEConfig(experts=8, k=2, ffn=14336, gate="mixtral", options=(("balance", 0.02 / 32),)),
        theta=1e6,
    ),
    replace(
        _llama("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, vocab=151936, seq=40960),
        moe=MoEConfig(experts=128, k=8, ffn=768, gate="qwen", options=(("normalise", True), ("balance", 0.001 / 48))),
        explicit_head_dim=128,
        qk_norm=True,
        theta=1e6,
        epsilon=1e-6,
    ),
    # DeepSeek extended its context by YaRN after training with these angles.
    _deepseek(
        _llama("deepseek-v2", 60, 5120, 128, 128, 12288, vocab=102400, seq=163840),
        _DEEPSEEK_MLA,
        MoEConfig(experts=160, k=6, ffn=1536, gate="deepseek-v2", shared_ffn=2 * 1536, dense_layers=1),
        groups=(8, 3),
        scale=16.0,
    ),
    # Without the multi-token-prediction layer (MTP), as in its published total of 671 billion.
    _deepseek(
        _llama("deepseek-v3", 61, 7168, 128, 128, 18432, vocab=129280, seq=163840),
        _DEEPSEEK_MLA,
        MoEConfig(experts=256, k=8, ffn=2048, gate="deepseek-v3", shared_ffn=2048, dense_layers=3),
        groups=(8, 4),
        scale=2.5,
    ),
    ModelConfig(name="conv-tiny", family="conv", layers=3, width=8, vocab=10, max_seq_len=16),
)

SIZES: Mapping[str, ModelConfig] = {config.name: config for config in _TABLE}


def find_model(name: str) -> ModelConfig:
    """The configuration of a named size, or of the model in a directory."""
    if name in SIZES:
        return SIZES[name]
    from echelon.models import model_dir  # imports this module

    if model_dir.is_model_dir(name):
        return model_dir.read_model_dir(Path(name)).config
    message, legal, hint = "is an unknown model size", ", ".join(SIZES), did_you_mean(name, SIZES)
    raise ValidationError([ValidationIssue(key="model", value=name, message=message, legal=legal, hint=hint)])


def override_config(
    config: ModelConfig,
    *,
    dropout: float | None = None,
    tied: bool | None = None,
    gate: str = "",
    expert_dropout: float | None = None,
    seq_len: int = 0,
) -> ModelConfig:
    """The configuration with the overrides that are given. RoPE allows sequences of any length."""
    rotary, moe = config.family == "llama", config.moe
    if moe is not None:
        moe = override_gate(moe, gate) if gate else moe
        moe = moe if expert_dropout is None else replace(moe, dropout=expert_dropout)
    return replace(
        config,
        moe=moe,
        max_seq_len=max(config.max_seq_len, seq_len) if rotary else config.max_seq_len,
        dropout=config.dropout if dropout is None else dropout,
        tied=config.tied if tied is None else tied,
    )
