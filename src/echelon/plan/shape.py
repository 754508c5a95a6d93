"""`ModelShape`: what planning needs to know of a model, layer by layer, and nothing of where it came from.

[Note: what a layer is made of]

    products    matrix products with weights; each token passes each of them once (an expert's: `share` of the tokens)
    attention   the products without weights, whose cost grows with the length of the sequence
    saved       what backward needs of the forward pass, in elements per token

Tensor parallelism divides a product by its `split`: columns (the outputs) or rows (the inputs). What lies between a
column and a row product is divided too; the rest of a layer is divided by sequence parallelism or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from echelon.plan import our_layers
from echelon.plan.kernels import KernelCounts

COLUMNS, ROWS, WHOLE = "columns", "rows", ""
ROUTER = "router"
"""the product that scores experts"""


@dataclass(frozen=True, kw_only=True)
class Product:
    """tokens x inputs times inputs x outputs."""

    name: str
    inputs: int
    outputs: int
    split: str
    """`columns`, `rows`, or `` where tensor parallelism leaves it whole"""
    experts: int = 0
    """matrices of this kind, of which a token uses `share` of one each; 0: not an expert's"""
    share: float = 1.0
    """tokens that pass one such matrix, per token of the layer: top_k for all experts of a layer together"""

    @cached_property
    def parameters(self) -> int:
        return self.inputs * self.outputs * max(self.experts, 1)

    @property
    def flops(self) -> float:
        """Forward, per token."""
        return 2.0 * self.inputs * self.outputs * self.share


@dataclass(frozen=True, kw_only=True)
class Attention:
    """softmax(q k) v."""

    heads: int
    kv_heads: int
    head_dim: int
    """of queries and keys"""
    value_dim: int
    """of values"""
    narrow: int = 0
    """elements of a token that queries, keys and values are made of; 0: the model's width"""
    causal: bool = True

    def flops(self, seq_len: int) -> float:
        """Forward, per token. Causal attention does half of it."""
        whole = 2.0 * self.heads * seq_len * (self.head_dim + self.value_dim)
        return whole / 2 if self.causal else whole


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of layer."""

    name: str
    products: tuple[Product, ...]
    attention: Attention | None = None
    other_parameters: int = 0
    """norms, biases: whole on every tp rank"""
    saved: float = 0.0
    """elements per token that backward needs and tensor parallelism does not divide (sequence parallelism does)"""
    saved_split: float = 0.0
    """elements per token that backward needs and tensor parallelism divides"""
    sent: float = 0.0
    """elements per token that go to experts, to all that it uses; backward needs them where they arrive"""
    saved_experts: float = 0.0
    """elements per token that backward needs inside experts, for all experts that a token uses"""
    passed: float = 0.0
    """elements per token that operators between the products read and write, forward; not divided by tp"""
    passed_split: float = 0.0
    """the same, divided by tp"""
    passed_experts: float = 0.0
    """the same where experts are, for all that a token uses"""
    other_flops: float = 0.0
    """forward, per token: products without weights that are not attention, as counted where a module is traced"""
    kernels: KernelCounts | None = None
    """what our kernels keep and move of it; none where it is not of a model of ours"""

    @cached_property
    def parameters(self) -> int:
        return sum(product.parameters for product in self.products) + self.other_parameters

    @cached_property
    def expert_parameters(self) -> int:
        return sum(product.parameters for product in self.products if product.experts)

    @cached_property
    def own_products(self) -> tuple[tuple[int, bool], ...]:
        """(parameters, whether tensor parallelism divides them) of all products but those of experts."""
        return tuple((product.parameters, bool(product.split)) for product in self.products if not product.experts)

    @property
    def active_parameters(self) -> float:
        """That one token uses."""
        return sum(product.flops / 2 for product in self.products) + self.other_parameters

    @property
    def is_mixture(self) -> bool:
        return self.expert_parameters > 0

    @property
    def has_shared(self) -> bool:
        """Beside its experts it has one that every token passes through, which tensor parallelism divides."""
        return self.is_mixture and sum(p.split == ROWS and not p.experts for p in self.products) > 1

    def flops(self, seq_len: int) -> float:
        """Forward, per token."""
        own = self.attention.flops(seq_len) if self.attention else 0.0
        return own + self.other_flops + sum(product.flops for product in self.products)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model: an embedding, layers in order, a head."""

    name: str
    width: int
    """elements per token that a layer hands to the next"""
    vocab: int
    layers: tuple[tuple[Layer, int], ...]
    """(kind, how many in a row), in order"""
    tied: bool = False
    max_seq_len: int = 0
    """that it was made for; where positions are a table, no sequence can be longer. 0: any"""
    position_parameters: int = 0
    """a table of learned positions"""
    other_parameters: int = 0
    """in no layer, embedding or head matrix: the last norm, a bias of the head"""
    experts: int = 0
    """of a mixture layer"""
    top_k: int = 0
    can_cut: bool = True
    """context parallelism can cut its sequences"""

    def each(self) -> Iterator[Layer]:
        """Every layer."""
        for layer, count in self.layers:
            for _ in range(count):
                yield layer

    @cached_property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def mixtures(self) -> int:
        """Layers with experts."""
        return sum(n for layer, n in self.layers if layer.is_mixture)

    @cached_property
    def attention(self) -> Attention | None:
        """Of the first layer that has one."""
        return next((layer.attention for layer, _ in self.layers if layer.attention), None)

    @cached_property
    def has_kernels(self) -> bool:
        """It is a model of ours, written with our kernels."""
        return all(layer.kernels is not None for layer, _ in self.layers)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.width + self.position_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.width

    @cached_property
    def parameters(self) -> int:
        """Unique ones."""
        head = 0 if self.tied else self.head_parameters
        outside = self.embedding_parameters + head + self.other_parameters
        return outside + sum(n * layer.parameters for layer, n in self.layers)

    @property
    def active_parameters(self) -> float:
        """That one token uses, embedding included."""
        idle = sum(n * (layer.parameters - layer.active_parameters) for layer, n in self.layers)
        return self.parameters - idle

    def flops(self, seq_len: int) -> float:
        """Forward, per token; a training step takes three times that."""
        return 2.0 * self.head_parameters + sum(n * layer.flops(seq_len) for layer, n in self.layers)

    def train_flops(self, seq_len: int) -> float:
        """Per token: what MFU counts."""
        return 3.0 * self.flops(seq_len)


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
    parts: our_layers.Parts | None = None,
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
        )

    def counts(mixed: bool) -> KernelCounts:
        assert parts is not None
        found = parts.stream(width, dropout) + parts.attention(width, attention, latent)
        if not mixed:
            return found + parts.feed_forward(width, ffn)
        shared = parts.feed_forward(width, shared_ffn) if shared_ffn else None
        own = gated if expert_gated is None else expert_gated
        size = expert_ffn or ffn
        return found + our_layers.mixture(width, size, experts=experts, top_k=top_k, gated=own, shared=shared)

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
    )


@dataclass(frozen=True, kw_only=True)
class Latent:
    """DeepSeek's attention: queries and key-values pass through narrow vectors."""

    query_rank: int
    """0: queries do not"""
    kv_rank: int
    rope_dim: int
    """of each head, with positions; keys share it"""
    nope_dim: int
    """of each head, without"""
    value_dim: int


def _attention(
    width: int, heads: int, kv_heads: int, head_dim: int, latent: Latent | None, causal: bool
) -> tuple[Attention, tuple[Product, ...]]:
    if latent is None:
        attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, causal=causal)
        return attention, (
            Product(name="qkv", inputs=width, outputs=(heads + 2 * kv_heads) * head_dim, split=COLUMNS),
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
            name="up", inputs=width, outputs=ffn * (2 if gated else 1), split=COLUMNS, experts=experts, share=share
        ),
        Product(name="down", inputs=ffn, outputs=width, split=ROWS, experts=experts, share=share),
    ]


@dataclass(frozen=True)
class RuleFacts:
    """What the layout's rules ask of a model."""

    shape: ModelShape

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def layers(self) -> int:
        return self.shape.num_layers

    @property
    def heads(self) -> int:
        return self._attention[0]

    @property
    def kv_heads(self) -> int:
        return self._attention[1]

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def ffn(self) -> int:
        return 0

    @property
    def vocab(self) -> int:
        return self.shape.vocab

    @property
    def tied(self) -> bool:
        return self.shape.tied

    @property
    def _attention(self) -> tuple[int, int]:
        found = self.shape.attention
        return (found.heads, found.kv_heads) if found else (0, 0)
