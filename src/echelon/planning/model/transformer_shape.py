"""The shape of a transformer from its sizes: GPT's or Llama's, dense or with experts."""

from __future__ import annotations

from itertools import groupby

from echelon.planning.cost import fused_layers, unfused_layers
from echelon.planning.cost.kernel_traffic import KernelCounts
from echelon.planning.model.model_shape import (
    COLUMNS,
    ROUTER,
    ROWS,
    WHOLE,
    Attention,
    Latent,
    Layer,
    ModelShape,
    Product,
)


def transformer(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int = 0,
    head_dim: int = 0,
    ffn: int,
    gated: bool,
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
    more_parameters: int = 0,
    parts: fused_layers.Parts | None = None,
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

    def layer(kind: str, products: tuple[Product, ...], inner: float, expert_inner: float) -> Layer:
        """`inner` are the elements per token inside the feed-forward part."""
        mixed = any(product.experts for product in products)
        # Saved: the inputs of both norms, of qkv and of the feed-forward part; q, k, v and attention's output; what is
        # inside the feed-forward part. Dropout saves a mask of one byte, half an element, three times. Of experts: the
        # rows that arrived, what is inside, and at home what came back, which is yet to be weighed.
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * (attention.head_dim + attention.value_dim)
        out = attention.heads * attention.value_dim
        between = sum(product.outputs for product in products if product.split == COLUMNS and not product.experts)
        return Layer(
            name=kind,
            products=(*projections, *products),
            attention=attention,
            other_parameters=norms + bias + (between + width if biases and between else 0) + more_parameters,
            saved=4 * width + (1.5 * width if dropout else 0) + (width * top_k if mixed else 0),
            saved_split=q + kv + 2 * out + inner,
            sent=width * top_k if mixed else 0.0,
            saved_experts=expert_inner * top_k if mixed else 0.0,
            passed=10 * width + (4 * width if dropout else 0) + (4 * width * top_k if mixed else 0),
            passed_split=2 * (q + kv) + 1.5 * inner,
            passed_experts=(2 * width + 1.5 * expert_inner) * top_k if mixed else 0.0,
            kernels=counts(mixed) if parts else None,
            plain=counts(mixed) + plainly(parts, mixed) if parts else None,
        )

    def counts(mixed: bool) -> KernelCounts:
        assert parts is not None
        found = parts.stream(width, dropout) + parts.attention(width, attention, latent)
        if not mixed:
            return found + parts.feed_forward(width, ffn)
        shared = parts.feed_forward(width, shared_ffn) if shared_ffn else None
        own = gated if expert_gated is None else expert_gated
        size = expert_ffn or ffn
        return found + fused_layers.mixture(width, size, experts=experts, top_k=top_k, gated=own, shared=shared)

    def plainly(parts: fused_layers.Parts, mixed: bool) -> KernelCounts:
        found = unfused_layers.more(parts, width, attention, latent)
        if not mixed:
            return found + unfused_layers.more_inside(parts, ffn)
        own = gated if expert_gated is None else expert_gated
        found += unfused_layers.more_of_experts(expert_ffn or ffn, top_k=top_k, gated=own)
        return found + unfused_layers.more_inside(parts, shared_ffn)

    # Between the first and the second product, saved: gate, up and their product; without a gate, before and after.
    expert_gated = gated if expert_gated is None else expert_gated
    per, expert_per = (3 if gated else 2), (3 if expert_gated else 2)
    plain = layer("dense", tuple(_feed_forward(width, ffn, gated)), per * ffn, 0)
    kinds: tuple[tuple[Layer, int], ...] = ((plain, layers),)
    if experts:
        inside = [Product(name=ROUTER, inputs=width, outputs=experts, split=WHOLE)]
        inside += _feed_forward(width, expert_ffn or ffn, expert_gated, experts=experts, share=top_k)
        inside += _feed_forward(width, shared_ffn, gated) if shared_ffn else []
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
) -> tuple[Attention, tuple[Product, ...]]:
    if latent is None:
        attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, causal=causal)
        parts = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
        return attention, (
            Product(name="qkv", inputs=width, outputs=sum(parts), split=COLUMNS, parts=parts),
            Product(name="out", inputs=heads * head_dim, outputs=width, split=ROWS),
        )
    query = latent.nope_dim + latent.rope_dim
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=query,
        value_dim=latent.value_dim,
        narrow=(latent.query_rank or width) + latent.kv_rank + latent.rope_dim,
        causal=causal,
    )
    products = [
        Product(name="kv down", inputs=width, outputs=latent.kv_rank + latent.rope_dim, split=WHOLE),
        Product(
            name="kv up", inputs=latent.kv_rank, outputs=heads * (latent.nope_dim + latent.value_dim), split=COLUMNS
        ),
        Product(name="out", inputs=heads * latent.value_dim, outputs=width, split=ROWS),
    ]
    if latent.query_rank:
        products.insert(0, Product(name="q down", inputs=width, outputs=latent.query_rank, split=WHOLE))
        products.insert(1, Product(name="q up", inputs=latent.query_rank, outputs=heads * query, split=COLUMNS))
    else:
        products.insert(0, Product(name="q", inputs=width, outputs=heads * query, split=COLUMNS))
    return attention, tuple(products)


def _feed_forward(width: int, ffn: int, gated: bool, *, experts: int = 0, share: float = 1.0) -> list[Product]:
    return [
        Product(
            name="up",
            inputs=width,
            outputs=ffn * (2 if gated else 1),
            split=COLUMNS,
            experts=experts,
            share=share,
            parts=(ffn, ffn) if gated else (),
        ),
        Product(name="down", inputs=ffn, outputs=width, split=ROWS, experts=experts, share=share),
    ]
