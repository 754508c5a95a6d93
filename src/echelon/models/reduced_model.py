"""Reduced models: small ones of the same family and features, with sizes that a layout divides. No torch.

[Note: the sizes of a reduced model]

    layers       one per pipeline chunk, at least four; one more where the chunks of the full model are uneven, too
    width        64 or a little more; half of it in a model of many layers, which has as many chunks
    heads        a tp rank has full kv heads, or shares one with others, as in the full model. Up to four query heads
                 per kv head: the ratio of the full model, or four
    head dim     4 or more, so that RoPE rotates different frequencies
    experts      up to 16, or the next multiple of ep; hidden units in multiples of 8, which etp divides
    everything   else is in proportion to the width
"""

from __future__ import annotations

import math
from dataclasses import replace

from echelon import moe as gates
from echelon.layout import Layout
from echelon.layout.rules import head_parallel_size
from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig

LAYERS, WIDTH, HEADS, VOCAB, MAX_SEQ_LEN, EXPERTS = 4, 64, 4, 257, 256, 16
MAX_LAYERS = 16
"""layers of recomputed segments, at most, unless there are more stages; a model of more is narrower"""
MAX_GROUP = 4
"""query heads per kv head, at most"""
MIN_HEAD_DIM = 4
MAX_K = 4
"""experts per token, at most"""


def reduced_config(
    config: ModelConfig,
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    heads: int = HEADS,
    kv_heads: int = 0,
    experts: int = EXPERTS,
    vocab: int = VOCAB,
    max_seq_len: int = MAX_SEQ_LEN,
    tp: int = 1,
) -> ModelConfig:
    """A small model of the same family and features, with about the same ratios of kv heads and ffn.

    `tp` divides its feed-forward widths. Without `kv_heads` the ratio of heads is the nearest to the model's.
    """
    if config.family == "conv":
        return config
    ratio, scale = config.heads / config.kv_heads, width / config.width
    divisors = [kv for kv in range(1, heads + 1) if heads % kv == 0]
    per_head = config.explicit_head_dim * config.heads / config.width
    return replace(
        config,
        name=f"{config.name}-reduced",
        layers=min(layers, config.layers),
        width=width,
        heads=heads,
        kv_heads=kv_heads or min(divisors, key=lambda kv: abs(heads / kv - ratio)),
        ffn=_next_multiple(math.ceil(config.ffn * scale), math.lcm(16, tp)),
        vocab=min(vocab, config.vocab),
        max_seq_len=min(max_seq_len, config.max_seq_len),
        explicit_head_dim=2 * round(per_head * width / heads / 2),
        mla=config.mla and _reduced_mla(config.mla, width // heads),
        moe=config.moe and _reduced_moe(config.moe, scale, experts, tp),
    )


def reduced_for_layout(
    config: ModelConfig, layout: Layout, folded: Layout, *, stages: int, seq_len: int, head_dim: int = 0
) -> ModelConfig:
    """A small model that stands for the full one in a layout, and that runs in the layout's folded form.

    See [Note: the sizes of a reduced model]. The layout must be valid for the full model; `stages` are those of the
    folded pipeline, over all ranks. Without `head_dim` heads are as narrow as they may be.
    """
    if config.family == "conv":
        return config
    heads, kv_heads = _num_heads(config, layout, folded)
    experts = _next_multiple(min(EXPERTS, config.moe.experts), folded.ep) if config.moe else EXPERTS
    layers = _num_layers(config, layout, folded.recompute, stages)
    width = WIDTH if layers <= MAX_LAYERS + 1 else WIDTH // 2
    head_dim = head_dim or max(_next_multiple(math.ceil(width / heads), 2), MIN_HEAD_DIM)
    return reduced_config(
        config,
        layers=layers,
        width=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        max_seq_len=max(MAX_SEQ_LEN, seq_len),
        tp=folded.tp,
    )


def describe_sizes(config: ModelConfig) -> str:
    """The sizes of a model in one line."""
    if config.family == "conv":
        return f"{config.name}: {config.layers} convolutions"
    heads = f"{config.heads} heads" + (f" ({config.kv_heads} kv)" if config.kv_heads != config.heads else "")
    experts = f", {config.moe.experts} experts of {config.moe.ffn}" if config.moe else ""
    sizes = f"{config.layers} layers, width {config.width}, {heads}, ffn {config.ffn}{experts}"
    return f"{config.name}: {sizes}, vocabulary {config.vocab}"


def _num_layers(config: ModelConfig, layout: Layout, recompute: str, stages: int) -> int:
    # A stage of several layers has several segments of recomputed layers.
    per_stage = max(min(3, MAX_LAYERS // stages), 1) if recompute.startswith(("every:", "sqrt")) else 1
    layers = max(LAYERS, per_stage * stages)
    uneven = config.layers % (layout.pp * layout.vpp) > 0
    if uneven and layers % stages == 0:
        return layers + 1
    return layers if uneven else _next_multiple(layers, stages)


def _num_heads(config: ModelConfig, layout: Layout, folded: Layout) -> tuple[int, int]:
    """(heads, kv heads)."""
    group = min(config.heads // config.kv_heads, MAX_GROUP)
    side, full_side = head_parallel_size(folded) or 1, head_parallel_size(layout) or 1
    # Ulysses divides the heads of a tp rank once more, and repeats kv heads where there are too few.
    parts, full_parts = side * folded.ulysses, full_side * layout.ulysses
    few = min(config.kv_heads, max(HEADS // group, 2))
    shared = [
        kv for kv in range(1, min(parts, config.kv_heads + 1)) if parts % kv == 0 and (kv % side == 0 or side % kv == 0)
    ]
    if full_parts > config.kv_heads and shared:
        kv_heads = shared[-1]
    else:
        kv_heads = _next_multiple(few, parts if config.kv_heads % full_parts == 0 else side)
    return kv_heads * _next_multiple(group, parts // math.gcd(parts, kv_heads)), kv_heads


def _next_multiple(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def _reduced_mla(mla: MLAConfig, nope_dim: int) -> MLAConfig:
    """Heads of this size, in about DeepSeek's proportions."""
    half = max(nope_dim // 4 * 2, 2)
    return MLAConfig(
        query_rank=2 * nope_dim if mla.query_rank else 0,
        kv_rank=nope_dim + half,
        rope_dim=half,
        nope_dim=nope_dim,
        value_dim=nope_dim,
    )


def _reduced_moe(moe: MoEConfig, scale: float, experts: int, tp: int) -> MoEConfig:
    """At most this many experts, of a hidden size times `scale` or less, and one dense layer."""
    experts, options = min(moe.experts, experts), dict(moe.options)
    if "num_groups" in options:
        options = gates.group_options(moe.gate, experts, options)
    shared_ffn = max(min(round(moe.shared_ffn * scale), 64), 8)
    return replace(
        moe,
        experts=experts,
        k=min(moe.k, MAX_K),
        ffn=max(min(round(moe.ffn * scale), 256 // experts) // 8 * 8, 8),
        options=tuple(options.items()),
        shared_ffn=_next_multiple(shared_ffn, tp) if moe.shared_ffn else 0,
        dense_layers=min(moe.dense_layers, 1),
    )
