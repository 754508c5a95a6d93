"""`LayerFamily`: what the layers of Echelon's models save and move, block by block: residual, attention, feed-forward.

Counts are of Echelon's kernels. The `unfused_*` functions count what torch's operators save on top, on a CPU and with
kernels=plain:

    RMSNorm             its input divided by the root mean square, besides input and output
    silu(gate) * up     the first factor; recompute=ops recomputes it
    attention           after RoPE the output lies head by head, and the projection behind it reads a copy

GPT's norms, activation and attention are torch's own everywhere.

[Note: an MoE layer]

The gate reads each token in float32; the token is sent k times, and k results are scaled and summed:

    forward    gate: the token in float32, written, and read by its GEMM; scores, softmax, sorting
               tokens permuted by expert; the activation; results scaled, permuted back, summed
    backward   gradients permuted by expert, times the weights and times the results; the activation; permuted back,
               summed; the gate's gradient in float32, and the sum of both
    saved      the token in float32, scores, the order of the scores of all experts, indices of the k copies;
               k copies as they arrived, what is inside their experts, and k results before scaling

[Note: RoPE in plain torch]

kernels/attention/rope.py rotates queries and keys in place only if one GEMM computed both. After QK-norm, and in MLA,
plain torch rotates: multiplications of halves with angles in float32, sums, a concatenation and a cast, which move 19
elements for each rotated one; 26 in backward, with the copy to where a norm or a GEMM reads it.

[Note: slow operators]

`forward` and `backward` count operators that move bytes as quickly as Echelon's kernels. Some are slower. A profile of
six layers of Qwen3 on an H200 (bench/measured/h200-mixtures.json) shows, relative to others:

    torch's operators on halves of rows             1.55 times as long
    torch's multiplication of rows by a scalar      2.4
    norms of rows of 128 elements, as heads have    5, in backward 9.5: one Triton program per row

They are counted as if they moved as much more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.models.attention_config import MLAConfig
from echelon.planning.model.layer_counts import LayerCounts, ShardedCount
from echelon.planning.model.model_shape import AttentionShape

ROPE_TRAFFIC, ROPE_BACKWARD_TRAFFIC = 1.55 * 19, 1.55 * 26
"""elements moved per rotated element: see [Note: RoPE in plain torch]"""
QK_NORM_TRAFFIC, QK_NORM_BACKWARD_TRAFFIC = 5 * 2, 9.5 * 3
"""elements moved per element of queries and keys: see [Note: slow operators]"""
GATE_SCALE_TRAFFIC = 2.4 * 2
"""elements moved to scale an element of a result, or of a gradient, by its gate weight"""
GATE_SCORE_TRAFFIC = 16
"""elements moved per score of a gate, forward, and again backward: the score in float32, its order in 64 bits"""
SAVED_SCORE_BYTES = 12
"""per score: the softmax's output, and its index in the order, of which the first k are used"""
SAVED_INDEX_BYTES = 32
"""per dispatched token: its token, its old and new index (64 bits each), its weight twice"""


@dataclass(frozen=True, kw_only=True)
class LayerFamily:
    """The functions that count each block of a model family's layers."""

    residual: Callable[[int, bool], LayerCounts]
    """norms and additions, of the width and with dropout or without"""
    attention: Callable[[int, AttentionShape, MLAConfig | None], LayerCounts]
    feed_forward: Callable[[int, int], LayerCounts]
    """of the width and the hidden size"""
    unfused_attention: Callable[[int, AttentionShape, MLAConfig | None], LayerCounts]
    """on top, with torch's operators: residual and attention"""
    unfused_feed_forward: Callable[[int], LayerCounts]
    """on top, with torch's operators: of the hidden size"""


def _residual(*, forward: int, backward: int) -> Callable[[int, bool], LayerCounts]:
    """Norms and additions, which move these elements per element of width."""

    def count(width: int, dropout: bool) -> LayerCounts:
        # Three masks of one byte, half an element, per token. Those of what both blocks add to the stream are saved;
        # masks of probabilities are counted with the scores.
        masks = ShardedCount(sp=1.5 * width if dropout else 0)
        return LayerCounts(
            saved=ShardedCount(sp=2 * width),
            saved_bytes=ShardedCount(sp=2 * width if dropout else 0),
            forward=ShardedCount(sp=forward * width) + 2 * masks,
            backward=ShardedCount(sp=backward * width) + 2 * masks,
        )

    return count


def _mlp(*, up: int, forward: int, backward: int, recompute: int) -> Callable[[int, int], LayerCounts]:
    """`up` are the activation's inputs, the others what it moves, in elements per element of the hidden size."""

    def count(width: int, ffn: int) -> LayerCounts:
        return LayerCounts(
            saved=ShardedCount(tp=up * ffn),
            tp_input=width,
            recomputable=ShardedCount(sp=width, tp=ffn),
            gemm_inputs=ShardedCount(sp=width, tp=ffn),
            gemm_outputs=ShardedCount(sp=width, tp=up * ffn),
            forward=ShardedCount(tp=forward * ffn),
            backward=ShardedCount(tp=backward * ffn),
            recompute=ShardedCount(sp=2 * width, tp=recompute * ffn),
        )

    return count


def _fused_qkv_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    """One GEMM for queries, keys and values; RoPE in place."""
    q, k, v, out = _qkv_elements(attention)
    return LayerCounts(
        saved=ShardedCount(tp=q + k + v + out),
        tp_input=width,
        recomputable=ShardedCount(sp=width),
        gemm_inputs=ShardedCount(sp=width, tp=out),
        gemm_outputs=ShardedCount(sp=width, tp=q + k + v),
        forward=ShardedCount(tp=2 * (q + k)),
        # Gradients of q, k and v are copied into one tensor.
        backward=ShardedCount(tp=2 * (q + k + v)),
        recompute=ShardedCount(sp=2 * width),
    )


def _qk_norm_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    """Three GEMMs; queries and keys are saved before their norms and after RoPE."""
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
        # The input gradients of three GEMMs are summed.
        backward=ShardedCount(sp=6 * width, tp=(QK_NORM_BACKWARD_TRAFFIC + ROPE_BACKWARD_TRAFFIC) * (q + k) + 2 * v),
        recompute=ShardedCount(sp=2 * width),
    )


def _latent_attention(width: int, attention: AttentionShape, latent: MLAConfig | None) -> LayerCounts:
    """MLA: latent vectors before their norms, and concatenated; queries and keys assembled; values in place."""
    assert latent is not None
    q, k, v, out = _qkv_elements(attention)
    normed, rotated = latent.query_rank + latent.kv_rank, attention.heads * latent.rope_dim
    latents, expanded = attention.latent_width, attention.heads * latent.nope_dim + v
    return LayerCounts(
        saved=ShardedCount(sp=latents + normed, tp=q + k + expanded + out),
        tp_input=latents,
        recomputable=ShardedCount(sp=width),
        # Queries take as much before RoPE as after it.
        core_saved=ShardedCount(tp=k),
        core_recompute=ShardedCount(tp=ROPE_TRAFFIC * rotated + 2 * (q + k)),
        gemm_inputs=ShardedCount(sp=2 * width + latents, tp=out),
        gemm_outputs=ShardedCount(sp=width + latents, tp=q + expanded),
        forward=ShardedCount(sp=2 * (normed + latent.kv_rank + latents), tp=ROPE_TRAFFIC * rotated + 2 * (q + k)),
        backward=ShardedCount(
            sp=3 * (normed + width) + 4 * latents, tp=ROPE_BACKWARD_TRAFFIC * rotated + 2 * (q + k + expanded)
        ),
        recompute=ShardedCount(sp=2 * width),
    )


def _unfused_llama(width: int, attention: AttentionShape, latent: MLAConfig | None) -> LayerCounts:
    saved = ShardedCount(sp=2 * width)
    if latent is not None:
        saved += ShardedCount(sp=latent.query_rank + latent.kv_rank)
    return LayerCounts(saved=saved, attention_copy=ShardedCount(tp=attention.heads * attention.value_dim))


def _unfused_qk_norm(width: int, attention: AttentionShape, latent: MLAConfig | None) -> LayerCounts:
    q, k, _, _ = _qkv_elements(attention)
    normed = ShardedCount(tp=q + k)
    return _unfused_llama(width, attention, latent) + LayerCounts(saved=normed, core_saved=normed)


def _gpt_attention(width: int, attention: AttentionShape, _: MLAConfig | None) -> LayerCounts:
    """Queries, keys and values have a GEMM each, with biases."""
    q, k, v, out = _qkv_elements(attention)
    return replace(
        _fused_qkv_attention(width, attention, None),
        gemm_inputs=ShardedCount(sp=3 * width, tp=out),
        forward=ShardedCount(),
        backward=ShardedCount(tp=q + k + v),
    )


def _qkv_elements(attention: AttentionShape) -> tuple[int, int, int, int]:
    """Elements per token of queries, keys, values and attention's output."""
    heads, kv_heads, head_dim, value_dim = attention.heads, attention.kv_heads, attention.head_dim, attention.value_dim
    return heads * head_dim, kv_heads * head_dim, kv_heads * value_dim, heads * value_dim


GPT = LayerFamily(
    # Backward: norms, additions where the stream forks and of the gradients from q, k and v, and sums for the biases.
    residual=_residual(forward=10, backward=20),
    attention=_gpt_attention,
    feed_forward=_mlp(up=1, forward=2, backward=4, recompute=2),
    unfused_attention=lambda width, attention, latent: LayerCounts(),
    unfused_feed_forward=lambda ffn: LayerCounts(),
)
LLAMA = LayerFamily(
    # The first norm reads the stream and writes; the second also adds to the stream, as the layer's end does. In
    # backward norms read two gradients and the stream, and write.
    residual=_residual(forward=9, backward=8),
    attention=_fused_qkv_attention,
    feed_forward=_mlp(up=2, forward=3, backward=5, recompute=1),
    unfused_attention=_unfused_llama,
    unfused_feed_forward=lambda ffn: LayerCounts(recomputable=ShardedCount(tp=ffn)),
)
LLAMA_QK_NORM = replace(LLAMA, attention=_qk_norm_attention, unfused_attention=_unfused_qk_norm)
LLAMA_MLA = replace(LLAMA, attention=_latent_attention)


def moe_feed_forward(
    width: int, ffn: int, *, experts: int, top_k: int, gated: bool, shared_expert: LayerCounts | None = None
) -> LayerCounts:
    """Count the feed-forward block of an MoE layer, in 16 bits or more. See [Note: an MoE layer]."""
    sent, inner, up = top_k * width, top_k * ffn, 2 if gated else 1
    counts = LayerCounts(
        saved=ShardedCount(sp=sent, routed=sent, expert=(up + 1) * inner),
        saved_bytes=ShardedCount(sp=4 * width + SAVED_SCORE_BYTES * experts + SAVED_INDEX_BYTES * top_k),
        forward=ShardedCount(
            sp=6 * width + GATE_SCORE_TRAFFIC * experts + (GATE_SCALE_TRAFFIC + 5) * sent, expert=(up + 1) * inner
        ),
        backward=ShardedCount(
            sp=11 * width + GATE_SCORE_TRAFFIC * experts + (GATE_SCALE_TRAFFIC + 9) * sent,
            expert=(2 * up + 1) * inner,
        ),
        # Tokens are permuted by expert where they arrive, and by rank where they leave.
        dispatch=ShardedCount(routed=4 * sent),
    )
    if shared_expert is None:
        return counts
    addition = ShardedCount(sp=3 * width)
    return counts + shared_expert + LayerCounts(forward=addition, backward=addition)


def unfused_experts(ffn: int, *, top_k: int, gated: bool) -> LayerCounts:
    """Count what torch's operators save on top, inside experts."""
    return LayerCounts(saved=ShardedCount(expert=top_k * ffn)) if gated else LayerCounts()
