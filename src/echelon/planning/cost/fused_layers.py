"""What the layers of our models keep and move, part by part: the residual stream, attention, the feed-forward part.

[Note: a mixture]

A token's row is read by the gate in 32 bits, sent k times, and k results are weighed and added up:

    forward    gate: the row in 32 bits, written, and read by its product; scores, their softmax, sorted
               rows put by expert; the activation; results weighed, put by token, added up
    backward   gradients put by expert, times the weights and times the results; the activation; put by token, added
               up; the gate's gradient in 32 bits, and the sum of both
    kept       the row in 32 bits, scores, the order of the scores of all experts, places of the k rows;
               k rows as they arrived, what is inside their experts, and k results before they are weighed

[Note: turned in plain torch]

Kernels turn queries and keys where they lie (kernels/attention/rope.py) only if one product has made both. After norms of heads,
and in latent attention, plain torch does: products of halves with angles in 32 bits, sums, a concatenation and a cast,
19 elements moved for each that is turned; 26 in backward, with the copy to where a norm or a product reads it.

[Note: slow operators]

Counts of `forward` and `backward` are of operators that move bytes as quickly as our kernels. Some do not. What a
profile of six layers of Qwen3's on an H200 (bench/measured/h200-mixtures.json) shows of these, to others:

    torch's operators on halves of rows             1.55 times as long
    torch's product of rows and a number for each   2.4
    norms of rows of 128 elements, as heads have    5, in backward 9.5: a program has a row

They are counted as if they moved as much more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.models.attention_config import MLAConfig
from echelon.planning.cost.kernel_traffic import LayerCounts, ShardedCount
from echelon.planning.model.model_shape import AttentionShape

ROPE_TRAFFIC, ROPE_BACKWARD_TRAFFIC = 1.55 * 19, 1.55 * 26
"""elements moved for each that is turned, forward and backward: see [Note: turned in plain torch]"""
QK_NORM_TRAFFIC, QK_NORM_BACKWARD_TRAFFIC = 5 * 2, 9.5 * 3
"""of queries and keys, for each element: see [Note: slow operators]"""
GATE_SCALE_TRAFFIC = 2.4 * 2
"""for each element of a result that is multiplied by its weight, or of a gradient"""
GATE_SCORE_TRAFFIC = 16
"""elements moved for each score of a gate, forward, and as many backward: in 32 bits, its order in 64"""
SAVED_SCORE_BYTES = 12
"""kept of each score: the softmax's output, and its place in the order, of which the first k are used"""
SAVED_INDEX_BYTES = 32
"""kept of each row that is sent: its token, where it was and is in the list (64 bits each), its weight twice"""


@dataclass(frozen=True, kw_only=True)
class LayerFamily:
    """A family's layers: who counts each part of them."""

    residual: Callable[[int, bool], LayerCounts]
    """of the width, and whether there is dropout: norms and additions"""
    attention: Callable[[int, AttentionShape, MLAConfig | None], LayerCounts]
    feed_forward: Callable[[int, int], LayerCounts]
    """of the width and the hidden size"""


# -- Llama ------------------------------------------------------------------------------------------------------------


def _llama_residual(width: int, dropout: bool) -> LayerCounts:
    masks = _dropout_traffic(width, dropout)
    return LayerCounts(
        saved=ShardedCount(sp=2 * width),
        saved_bytes=_dropout_mask_bytes(width, dropout),
        # The first norm reads the stream and writes; the second adds to the stream too, as the layer's end does.
        forward=ShardedCount(sp=9 * width) + 2 * masks,
        # Norms read two gradients and the stream, and write.
        backward=ShardedCount(sp=8 * width) + 2 * masks,
    )


def _fused_qkv_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    """One product makes queries, keys and values; queries and keys are turned where they lie."""
    q, k, v, out = _qkv_elements(attention)
    return LayerCounts(
        saved=ShardedCount(tp=q + k + v + out),
        tp_input=width,
        recomputable=ShardedCount(sp=width),
        gemm_inputs=ShardedCount(sp=width, tp=out),
        gemm_outputs=ShardedCount(sp=width, tp=q + k + v),
        forward=ShardedCount(tp=2 * (q + k)),
        # Gradients of q, k and v become one tensor.
        backward=ShardedCount(tp=2 * (q + k + v)),
        recompute=ShardedCount(sp=2 * width),
    )


def _qk_norm_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    """Three products; queries and keys are kept before their norms, and when they are turned."""
    q, k, v, out = _qkv_elements(attention)
    return LayerCounts(
        saved=ShardedCount(tp=2 * (q + k) + v + out),
        tp_input=width,
        recomputable=ShardedCount(sp=width),
        core_saved=ShardedCount(tp=q + k),
        core_recompute=ShardedCount(tp=(QK_NORM_TRAFFIC + ROPE_TRAFFIC) * (q + k)),
        gemm_inputs=ShardedCount(sp=3 * width, tp=out),
        gemm_outputs=ShardedCount(sp=width, tp=q + k + v),
        forward=ShardedCount(tp=(QK_NORM_TRAFFIC + ROPE_TRAFFIC) * (q + k)),
        # The gradients of what three products read are added up.
        backward=ShardedCount(sp=6 * width, tp=(QK_NORM_BACKWARD_TRAFFIC + ROPE_BACKWARD_TRAFFIC) * (q + k) + 2 * v),
        recompute=ShardedCount(sp=2 * width),
    )


def _latent_attention(width: int, attention: AttentionShape, latent: MLAConfig | None) -> LayerCounts:
    """Narrow vectors before their norms, and side by side; queries and keys put together; values where they lie."""
    assert latent is not None
    q, k, v, out = _qkv_elements(attention)
    normed, turned = latent.query_rank + latent.kv_rank, attention.heads * latent.rope_dim
    narrow, made = attention.latent_width, attention.heads * latent.nope_dim + v
    return LayerCounts(
        saved=ShardedCount(sp=narrow + normed, tp=q + k + made + out),
        tp_input=narrow,
        recomputable=ShardedCount(sp=width),
        # Queries as the product made them take as much as those that are turned.
        core_saved=ShardedCount(tp=k),
        core_recompute=ShardedCount(tp=ROPE_TRAFFIC * turned + 2 * (q + k)),
        gemm_inputs=ShardedCount(sp=2 * width + narrow, tp=out),
        gemm_outputs=ShardedCount(sp=width + narrow, tp=q + made),
        forward=ShardedCount(sp=2 * (normed + latent.kv_rank + narrow), tp=ROPE_TRAFFIC * turned + 2 * (q + k)),
        backward=ShardedCount(
            sp=3 * (normed + width) + 4 * narrow, tp=ROPE_BACKWARD_TRAFFIC * turned + 2 * (q + k + made)
        ),
        recompute=ShardedCount(sp=2 * width),
    )


def _swiglu(width: int, ffn: int) -> LayerCounts:
    """Gate and up are read, one is written."""
    return LayerCounts(
        saved=ShardedCount(tp=2 * ffn),
        tp_input=width,
        recomputable=ShardedCount(sp=width, tp=ffn),
        gemm_inputs=ShardedCount(sp=width, tp=ffn),
        gemm_outputs=ShardedCount(sp=width, tp=2 * ffn),
        forward=ShardedCount(tp=3 * ffn),
        backward=ShardedCount(tp=5 * ffn),
        recompute=ShardedCount(sp=2 * width, tp=ffn),
    )


# -- GPT: norms, activation and additions are torch's own; q, k and v are products of their own, with biases ----------


def _gpt_residual(width: int, dropout: bool) -> LayerCounts:
    masks = _dropout_traffic(width, dropout)
    return LayerCounts(
        saved=ShardedCount(sp=2 * width),
        saved_bytes=_dropout_mask_bytes(width, dropout),
        forward=ShardedCount(sp=10 * width) + 2 * masks,
        # Norms, additions where the stream forks and of the gradients from q, k and v, and sums for the biases.
        backward=ShardedCount(sp=20 * width) + 2 * masks,
    )


def _gpt_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    q, k, v, out = _qkv_elements(attention)
    return LayerCounts(
        saved=ShardedCount(tp=q + k + v + out),
        tp_input=width,
        recomputable=ShardedCount(sp=width),
        gemm_inputs=ShardedCount(sp=3 * width, tp=out),
        gemm_outputs=ShardedCount(sp=width, tp=q + k + v),
        backward=ShardedCount(tp=q + k + v),
        recompute=ShardedCount(sp=2 * width),
    )


def _gelu(width: int, ffn: int) -> LayerCounts:
    return LayerCounts(
        saved=ShardedCount(tp=ffn),
        tp_input=width,
        recomputable=ShardedCount(sp=width, tp=ffn),
        gemm_inputs=ShardedCount(sp=width, tp=ffn),
        gemm_outputs=ShardedCount(sp=width, tp=ffn),
        forward=ShardedCount(tp=2 * ffn),
        backward=ShardedCount(tp=4 * ffn),
        recompute=ShardedCount(sp=2 * width, tp=2 * ffn),
    )


def _dropout_traffic(width: int, dropout: bool) -> ShardedCount:
    """Three of one byte, half an element."""
    return ShardedCount(sp=1.5 * width if dropout else 0)


def _dropout_mask_bytes(width: int, dropout: bool) -> ShardedCount:
    """Kept: of what each of both parts adds to the stream. Those of probabilities are with the scores."""
    return ShardedCount(sp=2 * width if dropout else 0)


def _qkv_elements(attention: AttentionShape) -> tuple[int, int, int, int]:
    """Of queries, keys, values and attention's output."""
    heads, kv_heads = attention.heads, attention.kv_heads
    return (
        heads * attention.head_dim,
        kv_heads * attention.head_dim,
        kv_heads * attention.value_dim,
        heads * attention.value_dim,
    )


GPT = LayerFamily(residual=_gpt_residual, attention=_gpt_attention, feed_forward=_gelu)
LLAMA = LayerFamily(residual=_llama_residual, attention=_fused_qkv_attention, feed_forward=_swiglu)
LLAMA_QK_NORM = LayerFamily(residual=_llama_residual, attention=_qk_norm_attention, feed_forward=_swiglu)
LLAMA_MLA = LayerFamily(residual=_llama_residual, attention=_latent_attention, feed_forward=_swiglu)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def moe_feed_forward(
    width: int, ffn: int, *, experts: int, top_k: int, gated: bool, shared_expert: LayerCounts | None = None
) -> LayerCounts:
    """The feed-forward part of a mixture layer, in 16 bits or more. See [Note: a mixture]."""
    sent, inner, up = top_k * width, top_k * ffn, 2 if gated else 1
    found = LayerCounts(
        saved=ShardedCount(sp=sent, routed=sent, expert=(up + 1) * inner),
        saved_bytes=ShardedCount(sp=4 * width + SAVED_SCORE_BYTES * experts + SAVED_INDEX_BYTES * top_k),
        forward=ShardedCount(
            sp=6 * width + GATE_SCORE_TRAFFIC * experts + (GATE_SCALE_TRAFFIC + 5) * sent, expert=(up + 1) * inner
        ),
        backward=ShardedCount(
            sp=11 * width + GATE_SCORE_TRAFFIC * experts + (GATE_SCALE_TRAFFIC + 9) * sent, expert=(2 * up + 1) * inner
        ),
        # What arrives is put by expert, what leaves by rank.
        dispatch=ShardedCount(routed=4 * sent),
    )
    if shared_expert is None:
        return found
    added = ShardedCount(sp=3 * width)
    return found + shared_expert + LayerCounts(forward=added, backward=added)
