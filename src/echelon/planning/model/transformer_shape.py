"""The shape of a transformer from its sizes: GPT's or Llama's, dense or with experts."""

from __future__ import annotations

from itertools import groupby

from echelon.planning.cost import fused_layers, unfused_layers
from echelon.planning.cost.kernel_traffic import LayerCounts
from echelon.planning.model.model_shape import (
    COLUMN_PARALLEL,
    ROUTER,
    ROW_PARALLEL,
    UNSPLIT,
    AttentionShape,
    Latent,
    LayerShape,
    MatmulShape,
    ModelShape,
)


def transformer_shape(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int = 0,
    head_dim: int = 0,
    ffn: int,
    gated_mlp: bool,
    vocab: int,
    biases: bool = False,
    dropout: bool = False,
    tied: bool = False,
    max_seq_len: int = 0,
    learned_positions: bool = False,
    causal: bool = True,
    experts: int = 0,
    top_k: int = 0,
    expert_ffn: int = 0,
    expert_gated: bool | None = None,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    every: int = 1,
    latent: Latent | None = None,
    extra_parameters: int = 0,
    parts: fused_layers.LayerFamily | None = None,
) -> ModelShape:
    """The shape of a transformer, GPT's or Llama's, dense or with experts in every so many-th layer after dense ones.

    Experts have no biases, and a gate as the rest has one, unless said otherwise. `more_parameters` are in every layer
    and multiply nothing. `parts` count what our kernels do, where the model is one of ours (our_layers.py).
    """
    head_dim = head_dim or width // heads
    kv_heads = kv_heads or heads
    attention, projections = _attention(width, heads, kv_heads, head_dim, latent, causal)
    norms = (4 if biases else 2) * width
    bias = sum(p.outputs for p in projections) if biases else 0

    def layer(kind: str, products: tuple[MatmulShape, ...], inner: float, expert_inner: float) -> LayerShape:
        """`inner` are the elements per token inside the feed-forward part."""
        mixed = any(product.experts for product in products)
        # Saved: the inputs of both norms, of qkv and of the feed-forward part; q, k, v and attention's output; what is
        # inside the feed-forward part. Dropout saves a mask of one byte, half an element, three times. Of experts: the
        # rows that arrived, what is inside, and at home what came back, which is yet to be weighed.
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * (attention.head_dim + attention.value_dim)
        out = attention.heads * attention.value_dim
        between = sum(
            product.outputs for product in products if product.split == COLUMN_PARALLEL and not product.experts
        )
        return LayerShape(
            name=kind,
            matmuls=(*projections, *products),
            attention=attention,
            other_parameters=norms + bias + (between + width if biases and between else 0) + extra_parameters,
            saved_elements=4 * width + (1.5 * width if dropout else 0) + (width * top_k if mixed else 0),
            saved_elements_tp=q + kv + 2 * out + inner,
            dispatched_elements=width * top_k if mixed else 0.0,
            saved_elements_experts=expert_inner * top_k if mixed else 0.0,
            moved_elements=10 * width + (4 * width if dropout else 0) + (4 * width * top_k if mixed else 0),
            moved_elements_tp=2 * (q + kv) + 1.5 * inner,
            moved_elements_experts=(2 * width + 1.5 * expert_inner) * top_k if mixed else 0.0,
            fused=counts(mixed) if parts else None,
            unfused=counts(mixed) + plainly(parts, mixed) if parts else None,
        )

    def counts(mixed: bool) -> LayerCounts:
        assert parts is not None
        found = parts.residual(width, dropout) + parts.attention(width, attention, latent)
        if not mixed:
            return found + parts.feed_forward(width, ffn)
        shared = parts.feed_forward(width, shared_ffn) if shared_ffn else None
        own = gated_mlp if expert_gated is None else expert_gated
        size = expert_ffn or ffn
        return found + fused_layers.moe_feed_forward(
            width, size, experts=experts, top_k=top_k, gated=own, shared_expert=shared
        )

    def plainly(parts: fused_layers.LayerFamily, mixed: bool) -> LayerCounts:
        found = unfused_layers.extra_attention(parts, width, attention, latent)
        if not mixed:
            return found + unfused_layers.extra_feed_forward(parts, ffn)
        own = gated_mlp if expert_gated is None else expert_gated
        found += unfused_layers.extra_experts(expert_ffn or ffn, top_k=top_k, gated=own)
        return found + unfused_layers.extra_feed_forward(parts, shared_ffn)

    # Between the first and the second product, saved: gate, up and their product; without a gate, before and after.
    expert_gated = gated_mlp if expert_gated is None else expert_gated
    per, expert_per = (3 if gated_mlp else 2), (3 if expert_gated else 2)
    plain = layer("dense", tuple(_mlp_matmuls(width, ffn, gated_mlp)), per * ffn, 0)
    kinds: tuple[tuple[LayerShape, int], ...] = ((plain, layers),)
    if experts:
        inside = [MatmulShape(name=ROUTER, inputs=width, outputs=experts, split=UNSPLIT)]
        inside += _mlp_matmuls(width, expert_ffn or ffn, expert_gated, experts=experts, share=top_k)
        inside += _mlp_matmuls(width, shared_ffn, gated_mlp) if shared_ffn else []
        mixture = layer("mixture", tuple(inside), per * shared_ffn, expert_per * (expert_ffn or ffn))
        mixed = [index >= dense_layers and (index + 1 - dense_layers) % every == 0 for index in range(layers)]
        kinds = tuple((mixture if has else plain, len(list(run))) for has, run in groupby(mixed))
    return ModelShape(
        name=name,
        width=width,
        vocab=vocab,
        layers=kinds,
        tied=tied,
        max_seq_len=max_seq_len,
        position_parameters=max_seq_len * width if learned_positions else 0,
        other_parameters=(2 if biases else 1) * width,
        experts=experts,
        top_k=top_k,
        dropout=dropout,
    )


def _attention(
    width: int, heads: int, kv_heads: int, head_dim: int, latent: Latent | None, causal: bool
) -> tuple[AttentionShape, tuple[MatmulShape, ...]]:
    if latent is None:
        attention = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, causal=causal)
        parts = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
        return attention, (
            MatmulShape(name="qkv", inputs=width, outputs=sum(parts), split=COLUMN_PARALLEL, fused_outputs=parts),
            MatmulShape(name="out", inputs=heads * head_dim, outputs=width, split=ROW_PARALLEL),
        )
    query = latent.nope_dim + latent.rope_dim
    attention = AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=query,
        value_dim=latent.value_dim,
        latent_width=(latent.query_rank or width) + latent.kv_rank + latent.rope_dim,
        causal=causal,
    )
    products = [
        MatmulShape(name="kv down", inputs=width, outputs=latent.kv_rank + latent.rope_dim, split=UNSPLIT),
        MatmulShape(
            name="kv up",
            inputs=latent.kv_rank,
            outputs=heads * (latent.nope_dim + latent.value_dim),
            split=COLUMN_PARALLEL,
        ),
        MatmulShape(name="out", inputs=heads * latent.value_dim, outputs=width, split=ROW_PARALLEL),
    ]
    if latent.query_rank:
        products.insert(0, MatmulShape(name="q down", inputs=width, outputs=latent.query_rank, split=UNSPLIT))
        products.insert(
            1, MatmulShape(name="q up", inputs=latent.query_rank, outputs=heads * query, split=COLUMN_PARALLEL)
        )
    else:
        products.insert(0, MatmulShape(name="q", inputs=width, outputs=heads * query, split=COLUMN_PARALLEL))
    return attention, tuple(products)


def _mlp_matmuls(width: int, ffn: int, gated: bool, *, experts: int = 0, share: float = 1.0) -> list[MatmulShape]:
    return [
        MatmulShape(
            name="up",
            inputs=width,
            outputs=ffn * (2 if gated else 1),
            split=COLUMN_PARALLEL,
            experts=experts,
            token_share=share,
            fused_outputs=(ffn, ffn) if gated else (),
        ),
        MatmulShape(name="down", inputs=ffn, outputs=width, split=ROW_PARALLEL, experts=experts, token_share=share),
    ]
