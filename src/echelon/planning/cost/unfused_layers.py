"""What the layers of our models keep more of where torch's own operators run in place of our kernels: on a processor,
and with kernels=plain.

    norms of RMS        what they read, divided by its root, beside what they read and what they give
    silu(gate) times up the first of both; `ops` makes it again
    attention           after a rotation its result lies head by head, so that the product behind it reads a copy

GPT's norms, activation and attention are torch's own everywhere.
"""

from __future__ import annotations

from echelon.planning.cost import fused_layers
from echelon.planning.cost.kernel_traffic import KernelCounts, Part
from echelon.planning.model.model_shape import Attention, Latent


def more(parts: fused_layers.Parts, width: int, attention: Attention, latent: Latent | None) -> KernelCounts:
    """Of the stream and of attention."""
    if parts is fused_layers.GPT:
        return KernelCounts()
    q, k = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    out = attention.heads * attention.value_dim
    found = KernelCounts(kept=Part(whole=2 * width), apart=Part(split=out))
    if parts is fused_layers.NORMED:
        return found + KernelCounts(kept=Part(split=q + k), core=Part(split=q + k))
    if latent is not None:
        return found + KernelCounts(kept=Part(whole=latent.query_rank + latent.kv_rank))
    return found


def more_inside(parts: fused_layers.Parts, ffn: int) -> KernelCounts:
    """Of the feed-forward part."""
    return KernelCounts() if parts is fused_layers.GPT else KernelCounts(remade=Part(split=ffn))


def more_of_experts(ffn: int, *, top_k: int, gated: bool) -> KernelCounts:
    return KernelCounts(kept=Part(inner=top_k * ffn)) if gated else KernelCounts()
