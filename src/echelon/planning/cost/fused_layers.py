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

from echelon.planning.cost.kernel_traffic import KernelCounts, Part
from echelon.planning.model.model_shape import Attention, Latent

TURNED, TURNED_BACK = 1.55 * 19, 1.55 * 26
"""elements moved for each that is turned, forward and backward: see [Note: turned in plain torch]"""
HEAD_NORMS, HEAD_NORMS_BACK = 5 * 2, 9.5 * 3
"""of queries and keys, for each element: see [Note: slow operators]"""
WEIGHED = 2.4 * 2
"""for each element of a result that is multiplied by its weight, or of a gradient"""
SCORED = 16
"""elements moved for each score of a gate, forward, and as many backward: in 32 bits, its order in 64"""
SCORE_BYTES = 12
"""kept of each score: the softmax's output, and its place in the order, of which the first k are used"""
PLACE_BYTES = 32
"""kept of each row that is sent: its token, where it was and is in the list (64 bits each), its weight twice"""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A family's layers: who counts each part of them."""

    stream: Callable[[int, bool], KernelCounts]
    """of the width, and whether there is dropout: norms and additions"""
    attention: Callable[[int, Attention, Latent | None], KernelCounts]
    feed_forward: Callable[[int, int], KernelCounts]
    """of the width and the hidden size"""


# -- Llama ------------------------------------------------------------------------------------------------------------


def _llama_stream(width: int, dropout: bool) -> KernelCounts:
    masks = _masks(width, dropout)
    return KernelCounts(
        kept=Part(whole=2 * width),
        kept_bytes=_mask_bytes(width, dropout),
        # The first norm reads the stream and writes; the second adds to the stream too, as the layer's end does.
        forward=Part(whole=9 * width) + 2 * masks,
        # Norms read two gradients and the stream, and write.
        backward=Part(whole=8 * width) + 2 * masks,
    )


def _turned(width: int, attention: Attention, _: Latent | None) -> KernelCounts:
    """One product makes queries, keys and values; queries and keys are turned where they lie."""
    q, k, v, out = _elements(attention)
    return KernelCounts(
        kept=Part(split=q + k + v + out),
        entered=width,
        remade=Part(whole=width),
        inputs=Part(whole=width, split=out),
        outputs=Part(whole=width, split=q + k + v),
        forward=Part(split=2 * (q + k)),
        # Gradients of q, k and v become one tensor.
        backward=Part(split=2 * (q + k + v)),
        again=Part(whole=2 * width),
    )


def _normed(width: int, attention: Attention, _: Latent | None) -> KernelCounts:
    """Three products; queries and keys are kept before their norms, and when they are turned."""
    q, k, v, out = _elements(attention)
    return KernelCounts(
        kept=Part(split=2 * (q + k) + v + out),
        entered=width,
        remade=Part(whole=width),
        core=Part(split=q + k),
        core_again=Part(split=(HEAD_NORMS + TURNED) * (q + k)),
        inputs=Part(whole=3 * width, split=out),
        outputs=Part(whole=width, split=q + k + v),
        forward=Part(split=(HEAD_NORMS + TURNED) * (q + k)),
        # The gradients of what three products read are added up.
        backward=Part(whole=6 * width, split=(HEAD_NORMS_BACK + TURNED_BACK) * (q + k) + 2 * v),
        again=Part(whole=2 * width),
    )


def _latent(width: int, attention: Attention, latent: Latent | None) -> KernelCounts:
    """Narrow vectors before their norms, and side by side; queries and keys put together; values where they lie."""
    assert latent is not None
    q, k, v, out = _elements(attention)
    normed, turned = latent.query_rank + latent.kv_rank, attention.heads * latent.rope_dim
    narrow, made = attention.narrow, attention.heads * latent.nope_dim + v
    return KernelCounts(
        kept=Part(whole=narrow + normed, split=q + k + made + out),
        entered=narrow,
        remade=Part(whole=width),
        # Queries as the product made them take as much as those that are turned.
        core=Part(split=k),
        core_again=Part(split=TURNED * turned + 2 * (q + k)),
        inputs=Part(whole=2 * width + narrow, split=out),
        outputs=Part(whole=width + narrow, split=q + made),
        forward=Part(whole=2 * (normed + latent.kv_rank + narrow), split=TURNED * turned + 2 * (q + k)),
        backward=Part(whole=3 * (normed + width) + 4 * narrow, split=TURNED_BACK * turned + 2 * (q + k + made)),
        again=Part(whole=2 * width),
    )


def _swiglu(width: int, ffn: int) -> KernelCounts:
    """Gate and up are read, one is written."""
    return KernelCounts(
        kept=Part(split=2 * ffn),
        entered=width,
        remade=Part(whole=width, split=ffn),
        inputs=Part(whole=width, split=ffn),
        outputs=Part(whole=width, split=2 * ffn),
        forward=Part(split=3 * ffn),
        backward=Part(split=5 * ffn),
        again=Part(whole=2 * width, split=ffn),
    )


# -- GPT: norms, activation and additions are torch's own; q, k and v are products of their own, with biases ----------


def _gpt_stream(width: int, dropout: bool) -> KernelCounts:
    masks = _masks(width, dropout)
    return KernelCounts(
        kept=Part(whole=2 * width),
        kept_bytes=_mask_bytes(width, dropout),
        forward=Part(whole=10 * width) + 2 * masks,
        # Norms, additions where the stream forks and of the gradients from q, k and v, and sums for the biases.
        backward=Part(whole=20 * width) + 2 * masks,
    )


def _apart(width: int, attention: Attention, _: Latent | None) -> KernelCounts:
    q, k, v, out = _elements(attention)
    return KernelCounts(
        kept=Part(split=q + k + v + out),
        entered=width,
        remade=Part(whole=width),
        inputs=Part(whole=3 * width, split=out),
        outputs=Part(whole=width, split=q + k + v),
        backward=Part(split=q + k + v),
        again=Part(whole=2 * width),
    )


def _gelu(width: int, ffn: int) -> KernelCounts:
    return KernelCounts(
        kept=Part(split=ffn),
        entered=width,
        remade=Part(whole=width, split=ffn),
        inputs=Part(whole=width, split=ffn),
        outputs=Part(whole=width, split=ffn),
        forward=Part(split=2 * ffn),
        backward=Part(split=4 * ffn),
        again=Part(whole=2 * width, split=2 * ffn),
    )


def _masks(width: int, dropout: bool) -> Part:
    """Three of one byte, half an element."""
    return Part(whole=1.5 * width if dropout else 0)


def _mask_bytes(width: int, dropout: bool) -> Part:
    """Kept: of what each of both parts adds to the stream. Those of probabilities are with the scores."""
    return Part(whole=2 * width if dropout else 0)


def _elements(attention: Attention) -> tuple[int, int, int, int]:
    """Of queries, keys, values and attention's output."""
    heads, kv_heads = attention.heads, attention.kv_heads
    return (
        heads * attention.head_dim,
        kv_heads * attention.head_dim,
        kv_heads * attention.value_dim,
        heads * attention.value_dim,
    )


GPT = Parts(stream=_gpt_stream, attention=_apart, feed_forward=_gelu)
LLAMA = Parts(stream=_llama_stream, attention=_turned, feed_forward=_swiglu)
NORMED = Parts(stream=_llama_stream, attention=_normed, feed_forward=_swiglu)
LATENT = Parts(stream=_llama_stream, attention=_latent, feed_forward=_swiglu)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def mixture(
    width: int, ffn: int, *, experts: int, top_k: int, gated: bool, shared: KernelCounts | None = None
) -> KernelCounts:
    """The feed-forward part of a mixture layer, in 16 bits or more. See [Note: a mixture]."""
    sent, inner, up = top_k * width, top_k * ffn, 2 if gated else 1
    found = KernelCounts(
        kept=Part(whole=sent, rows=sent, inner=(up + 1) * inner),
        kept_bytes=Part(whole=4 * width + SCORE_BYTES * experts + PLACE_BYTES * top_k),
        forward=Part(whole=6 * width + SCORED * experts + (WEIGHED + 5) * sent, inner=(up + 1) * inner),
        backward=Part(whole=11 * width + SCORED * experts + (WEIGHED + 9) * sent, inner=(2 * up + 1) * inner),
        # What arrives is put by expert, what leaves by rank.
        travelling=Part(rows=4 * sent),
    )
    if shared is None:
        return found
    added = Part(whole=3 * width)
    return found + shared + KernelCounts(forward=added, backward=added)
