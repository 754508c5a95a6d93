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

from echelon.planning.model.layer_counts import LayerCounts

COLUMN_PARALLEL, ROW_PARALLEL, UNSPLIT = "columns", "rows", ""
ROUTER = "router"
"""the product that scores experts"""


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """tokens x inputs times inputs x outputs."""

    name: str
    inputs: int
    outputs: int
    split: str
    """`columns`, `rows`, or `` where tensor parallelism leaves it whole"""
    experts: int = 0
    """matrices of this kind, of which a token uses `share` of one each; 0: not an expert's"""
    fused_outputs: tuple[int, ...] = ()
    """outputs of each parameter that it is made of: queries, keys and values; gate and up. Empty: it is one"""
    token_share: float = 1.0
    """tokens that pass one such matrix, per token of the layer: top_k for all experts of a layer together"""

    @cached_property
    def parameters(self) -> int:
        return self.inputs * self.outputs * max(self.experts, 1)

    @property
    def flops(self) -> float:
        """Forward, per token."""
        return 2.0 * self.inputs * self.outputs * self.token_share


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """softmax(q k) v."""

    heads: int
    kv_heads: int
    head_dim: int
    """of queries and keys"""
    value_dim: int
    """of values"""
    latent_width: int = 0
    """elements of a token that queries, keys and values are made of; 0: the model's width"""
    causal: bool = True

    def flops(self, seq_len: int) -> float:
        """Forward, per token. Causal attention does half of it."""
        whole = 2.0 * self.heads * seq_len * (self.head_dim + self.value_dim)
        return whole / 2 if self.causal else whole


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One kind of layer."""

    name: str
    matmuls: tuple[MatmulShape, ...]
    attention: AttentionShape | None = None
    other_parameters: int = 0
    """norms, biases: whole on every tp rank"""
    saved_elements: float = 0.0
    """elements per token that backward needs and tensor parallelism does not divide (sequence parallelism does)"""
    saved_elements_tp: float = 0.0
    """elements per token that backward needs and tensor parallelism divides"""
    dispatched_elements: float = 0.0
    """elements per token that go to experts, to all that it uses; backward needs them where they arrive"""
    saved_elements_experts: float = 0.0
    """elements per token that backward needs inside experts, for all experts that a token uses"""
    moved_elements: float = 0.0
    """elements per token that operators between the products read and write, forward; not divided by tp"""
    moved_elements_tp: float = 0.0
    """the same, divided by tp"""
    moved_elements_experts: float = 0.0
    """the same where experts are, for all that a token uses"""
    other_flops: float = 0.0
    """forward, per token: products without weights that are not attention, as counted where a module is traced"""
    fused: LayerCounts | None = None
    """what our kernels keep and move of it; none where it is not of a model of ours"""
    unfused: LayerCounts | None = None
    """what our model keeps of it where torch's own operators run"""

    @cached_property
    def parameters(self) -> int:
        return sum(product.parameters for product in self.matmuls) + self.other_parameters

    @cached_property
    def expert_parameters(self) -> int:
        return sum(product.parameters for product in self.matmuls if product.experts)

    @cached_property
    def dense_matmuls(self) -> tuple[tuple[int, bool], ...]:
        """(parameters, whether tensor parallelism divides them) of all products but those of experts."""
        return tuple((product.parameters, bool(product.split)) for product in self.matmuls if not product.experts)

    @property
    def active_parameters(self) -> float:
        """That one token uses."""
        return sum(product.flops / 2 for product in self.matmuls) + self.other_parameters

    @property
    def is_moe(self) -> bool:
        return self.expert_parameters > 0

    @property
    def has_shared_expert(self) -> bool:
        """Beside its experts it has one that every token passes through, which tensor parallelism divides."""
        return self.is_moe and sum(p.split == ROW_PARALLEL and not p.experts for p in self.matmuls) > 1

    def flops(self, seq_len: int) -> float:
        """Forward, per token."""
        own = self.attention.flops(seq_len) if self.attention else 0.0
        return own + self.other_flops + sum(product.flops for product in self.matmuls)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model: an embedding, layers in order, a head."""

    name: str
    width: int
    """elements per token that a layer hands to the next"""
    vocab: int
    layers: tuple[tuple[LayerShape, int], ...]
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
    supports_cp: bool = True
    """context parallelism can cut its sequences"""
    dropout: bool = False
    """on attention's probabilities too, which are then written out in our models"""

    def iter_layers(self) -> Iterator[LayerShape]:
        """Every layer."""
        for layer, count in self.layers:
            for _ in range(count):
                yield layer

    @cached_property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return sum(n for layer, n in self.layers if layer.is_moe)

    @cached_property
    def attention(self) -> AttentionShape | None:
        """Of the first layer that has one."""
        return next((layer.attention for layer, _ in self.layers if layer.attention), None)

    @cached_property
    def is_native(self) -> bool:
        """It is a model of ours, written with our kernels."""
        return all(layer.fused is not None for layer, _ in self.layers)

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
