"""`ModelShape`: the layers of a model as the planner counts them, wherever it comes from.

[Note: a layer]

    matmuls     GEMMs with weights; each token passes each of them once, an expert's `token_share` of the tokens
    attention   GEMMs without weights, whose cost grows with the length of the sequence
    saved       what autograd saves for backward, in elements per token

Tensor parallelism splits a GEMM by its `split`: columns (outputs) or rows (inputs). It also splits what is between a
column-parallel and a row-parallel GEMM; sequence parallelism splits the rest of a layer, or nothing does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from echelon.planning.model.layer_counts import LayerCounts
from echelon.planning.model.layout_support import FULL_SUPPORT, ModelSupport

COLUMN_PARALLEL, ROW_PARALLEL, UNSPLIT = "columns", "rows", ""
ROUTER = "router"
"""the GEMM of the gate"""


MAX_DEFAULT_SEQ_LEN = 4096


def default_seq_len(max_seq_len: int) -> int:
    """Tokens of a sequence where the user gives none: the model's longest (0: any), at most 4,096."""
    return min(max_seq_len or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN)


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """tokens x inputs times inputs x outputs."""

    name: str
    inputs: int
    outputs: int
    split: str
    """`columns`, `rows`, or empty where tensor parallelism replicates it"""
    experts: int = 0
    """number of such matrices; 0: not an expert's"""
    fused_outputs: tuple[int, ...] = ()
    """outputs of each fused parameter: q, k and v; gate and up. Empty: one parameter"""
    token_share: float = 1.0
    """tokens that pass it per token of the layer: top_k for the experts of a layer together"""
    is_gathered: bool = False
    """in a module that gets full sequences under context parallelism (parallel/cp/sequence_gather.py)"""

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
    latent_width: int = 0
    """elements of a token's MLA latents; 0: q, k and v are projected from the hidden state"""
    causal: bool = True

    def flops(self, seq_len: int) -> float:
        """Forward FLOPs per token. Causal attention computes half."""
        full = 2.0 * self.heads * seq_len * (self.head_dim + self.value_dim)
        return full / 2 if self.causal else full


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer of a model."""

    name: str
    matmuls: tuple[MatmulShape, ...]
    attention: AttentionShape | None = None
    other_parameters: int = 0
    """norms, biases: replicated on every tp rank"""
    saved_elements: float = 0.0
    """saved elements per token that tp does not split (sequence parallelism does)"""
    saved_elements_tp: float = 0.0
    """saved elements per token that tp splits"""
    dispatched_elements: float = 0.0
    """elements per token dispatched to all its experts, which save them"""
    saved_elements_experts: float = 0.0
    """elements per token saved inside all its experts"""
    moved_elements: float = 0.0
    """elements per token that memory-bound operators read and write in forward; not split by tp"""
    moved_elements_tp: float = 0.0
    """the same, split by tp"""
    moved_elements_experts: float = 0.0
    """the same in all experts of a token"""
    gathered_modules: int = 0
    """modules that get full sequences under context parallelism"""
    gathered_saved: float = 0.0
    """their share of the saved elements"""
    gathered_moved: float = 0.0
    """and of the moved ones"""
    other_flops: float = 0.0
    """forward FLOPs per token of traced GEMMs without weights that are not attention"""
    fused: LayerCounts | None = None
    """what our kernels save and move; none: not one of our models"""
    unfused: LayerCounts | None = None
    """what our model saves with torch's operators"""

    @cached_property
    def parameters(self) -> int:
        return sum(gemm.parameters for gemm in self.matmuls) + self.other_parameters

    @cached_property
    def expert_parameters(self) -> int:
        return sum(gemm.parameters for gemm in self.matmuls if gemm.experts)

    @cached_property
    def dense_matmuls(self) -> tuple[tuple[int, bool], ...]:
        """(parameters, whether tp splits them) of all GEMMs but those of experts."""
        return tuple((gemm.parameters, bool(gemm.split)) for gemm in self.matmuls if not gemm.experts)

    @property
    def active_parameters(self) -> float:
        """Parameters that one token uses."""
        return sum(gemm.flops / 2 for gemm in self.matmuls) + self.other_parameters

    def gathered_factor(self, share: float, cp: int) -> float:
        """Elements on one of `cp` ranks, to those of its part of the sequence, if a share is of full sequences."""
        return 1 + share * (cp - 1)

    @property
    def is_moe(self) -> bool:
        return self.expert_parameters > 0

    @property
    def has_shared_expert(self) -> bool:
        """Whether it has a shared expert, which tp splits."""
        return self.is_moe and sum(p.split == ROW_PARALLEL and not p.experts for p in self.matmuls) > 1

    def flops(self, seq_len: int) -> float:
        """Forward, per token."""
        attention = self.attention.flops(seq_len) if self.attention else 0.0
        return attention + self.other_flops + sum(gemm.flops for gemm in self.matmuls)


@dataclass(frozen=True)
class ShapeDimensions:
    """The dimensions of a shape that the layout's rules check: layout/rules.py."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    vocab: int
    tied: bool
    ffn: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """A loss that torch's operators compute some tokens at a time (models/foreign/language_head.py)."""

    divides_vocab: bool
    """a tp rank has the logits of its words alone"""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model: an embedding, layers in order, a head."""

    name: str
    width: int
    """elements per token between layers"""
    vocab: int
    layers: tuple[tuple[LayerShape, int], ...]
    """(layer, repetitions), in order"""
    tied: bool = False
    max_seq_len: int = 0
    """longest sequence, a limit for learned positions; 0: not stated"""
    traced_seq_len: int = 0
    """tokens of a row of a custom model's batch; 0: not traced"""
    position_parameters: int = 0
    """a table of learned positions"""
    other_parameters: int = 0
    """outside of layers, embedding and head: the last norm, a bias of the head"""
    experts: int = 0
    """of an MoE layer"""
    top_k: int = 0
    trainable: bool = True
    """there is a model that trains it"""
    support: ModelSupport = FULL_SUPPORT
    """which layouts `train` has for it"""
    dropout: bool = False
    """also on attention's probabilities, which our models then materialise"""
    loss: ChunkedLoss | None = None
    """of a model of transformers; none: the logits of all tokens are held, or our kernels fuse the loss"""

    def iter_layers(self) -> Iterator[LayerShape]:
        return (layer for layer, count in self.layers for _ in range(count))

    @cached_property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(n for layer, n in self.layers if layer.is_moe)

    @cached_property
    def num_gathered_modules(self) -> int:
        """Modules that get full sequences under context parallelism."""
        return sum(n * layer.gathered_modules for layer, n in self.layers)

    @cached_property
    def num_gathered_layers(self) -> int:
        return sum(n for layer, n in self.layers if layer.gathered_modules)

    @cached_property
    def attention(self) -> AttentionShape | None:
        """Attention of the first layer that has it."""
        return next((layer.attention for layer, _ in self.layers if layer.attention), None)

    @cached_property
    def is_native(self) -> bool:
        """Whether it is one of our models, with counted layers."""
        return all(layer.fused is not None for layer, _ in self.layers)

    @cached_property
    def dimensions(self) -> ShapeDimensions:
        heads, kv_heads = (self.attention.heads, self.attention.kv_heads) if self.attention else (0, 0)
        return ShapeDimensions(self.name, self.num_layers, heads, kv_heads, self.width, self.vocab, self.tied)

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
        """Parameters that one token uses, with the embedding."""
        idle = sum(n * (layer.parameters - layer.active_parameters) for layer, n in self.layers)
        return self.parameters - idle

    def flops(self, seq_len: int) -> float:
        """Forward, per token; a training step takes three times that."""
        return 2.0 * self.head_parameters + sum(n * layer.flops(seq_len) for layer, n in self.layers)

    def train_flops(self, seq_len: int) -> float:
        """FLOPs per token that MFU counts."""
        return 3.0 * self.flops(seq_len)
