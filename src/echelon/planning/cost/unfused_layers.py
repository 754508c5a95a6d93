"""What the layers of our models keep more of where torch's own operators run in place of our kernels: on a processor,
and with kernels=plain.

    norms of RMS        what they read, divided by its root, beside what they read and what they give
    silu(gate) times up the first of both; `ops` makes it again
    attention           after a rotation its result lies head by head, so that the product behind it reads a copy

GPT's norms, activation and attention are torch's own everywhere.
"""

from __future__ import annotations

from echelon.models.attention_config import MLAConfig
from echelon.planning.cost import fused_layers
from echelon.planning.cost.kernel_traffic import LayerCounts, ShardedCount
from echelon.planning.model.model_shape import AttentionShape


def extra_attention(
    family: fused_layers.LayerFamily, width: int, attention: AttentionShape, latent: MLAConfig | None
) -> LayerCounts:
    """Of the stream and of attention."""
    if family is fused_layers.GPT:
        return LayerCounts()
    q, k = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    out = attention.heads * attention.value_dim
    found = LayerCounts(saved=ShardedCount(sp=2 * width), attention_copy=ShardedCount(tp=out))
    if family is fused_layers.LLAMA_QK_NORM:
        return found + LayerCounts(saved=ShardedCount(tp=q + k), core_saved=ShardedCount(tp=q + k))
    if latent is not None:
        return found + LayerCounts(saved=ShardedCount(sp=latent.query_rank + latent.kv_rank))
    return found


def extra_feed_forward(family: fused_layers.LayerFamily, ffn: int) -> LayerCounts:
    """Of the feed-forward part."""
    return LayerCounts() if family is fused_layers.GPT else LayerCounts(recomputable=ShardedCount(tp=ffn))


def extra_experts(ffn: int, *, top_k: int, gated: bool) -> LayerCounts:
    return LayerCounts(saved=ShardedCount(expert=top_k * ffn)) if gated else LayerCounts()
