"""What tensor and sequence parallelism cost: the collectives of a step over tp, to the byte. No torch.

    sp=0   norm, dropout, residual: the full sequence on every rank      enter: -            leave: all-reduce
    sp=1   norm, dropout, residual: a slice of the sequence per rank     enter: all-gather   leave: reduce-scatter

An all-reduce is a reduce-scatter followed by an all-gather, so sp=1 sends the same bytes, while the activations saved
between regions shrink by tp. Norm weights, row-parallel biases and position embeddings then see a slice of the tokens:
their gradients are partial and summed over tp once a step (`LogicalParam.partial_grad_axes`). A sequence that tp does
not divide is padded outside the regions and trimmed inside them, so padding meets neither attention nor loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import ParamGroupSpec
from echelon.layout.rules import head_parallel_size
from echelon.memory.checkpointing.cost import RecomputedLayers, partition_numel

if TYPE_CHECKING:
    from echelon.models.model_config import ModelConfig


@dataclass(frozen=True)
class GridShape:
    """The ranks of tp along each axis of a grid; tp_kind=1d is a grid of one row."""

    z: int
    y: int
    x: int

    @property
    def batch_parts(self) -> int:
        """Parts into which a microbatch's sequences are divided."""
        return self.z * self.y

    def local_batch(self, batch: int) -> int:
        """Return the sequences of a microbatch on one rank, padding included."""
        return -(-batch // self.batch_parts)


def grid_shape(layout: Layout) -> GridShape:
    if layout.tp_kind == "1d":
        return GridShape(1, 1, layout.tp)
    side = head_parallel_size(layout)
    assert side is not None
    return GridShape(layout.tp // side**2, side, side)


def region_axis(layout: Layout) -> str:
    """Return the axis over which columns inside a region (heads, ffn) and the vocabulary are sharded."""
    return {"1d": "tp", "3d": "y"}.get(layout.tp_kind, "x")


def loss_token_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes inside tp over which the tokens of the loss are divided; with tp_kind=1d all ranks have all."""
    return {"1d": (), "3d": ("z", "x")}.get(layout.tp_kind, ("z", "y"))


def local_activation_shape(layout: Layout, batch: int, width: int) -> tuple[int, int]:
    """Return (sequences, columns) of a microbatch between regions on one rank; all of them with tp_kind=1d."""
    grid = grid_shape(layout)
    return grid.local_batch(batch), width if layout.tp_kind == "1d" else -(-width // grid.x)


def padded_vocab_rows(layout: Layout, rows: int) -> int:
    """Return the rows of a padded table on all ranks together: 3d splits a rank's part once more."""
    side = grid_shape(layout).x
    local = -(-rows // side)
    return (-(-local // side) * side if layout.tp_kind == "3d" else local) * side


def num_weight_shards(layout: Layout) -> int:
    """Return the tp ranks that hold different parts of a weight: 2.5d replicates them over its layers."""
    return layout.tp // layout.depth


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """Sizes of a transformer that determine its communication volume."""

    layers: int
    """layers on this rank"""
    width: int
    batch: int
    """sequences in a microbatch"""
    seq_len: int
    dropout: bool
    """dropout follows a block's last GEMM: recomputation then repeats that block's last collective too"""
    element_bytes: int
    loss_bytes: int
    """bytes of one element of the loss computation: 4, or 8 under float64"""
    has_embedding: bool = True
    """this rank has the embedding"""
    has_head: bool = True
    """this rank has the head"""
    frozen_inputs: bool = False
    """nothing before the first region is trained: backward neither leaves it nor reaches the embedding"""
    heads: int = 1
    kv_heads: int = 1
    """of the unsharded model, as `heads`"""
    head_dim: int = 0
    """elements of a head's query and key; 0: width / heads"""
    value_dim: int = 0
    """elements of a head's value; 0: head_dim"""
    attention_input_width: int = 0
    """elements per token that enter the attention region (MLA's latent vectors); 0: width"""
    moe_layers: int = 0
    """MoE layers among `layers`"""
    first_moe_layer: int | None = None
    """index of the model's first MoE layer: after it, load-balance losses travel from layer to layer"""
    has_shared_expert: bool = False
    """MoE layers have a shared expert: a region like the MLP of a dense layer"""
    causal: bool = True

    @classmethod
    def from_config(cls, config: ModelConfig, *, batch: int, seq_len: int, element_bytes: int) -> TransformerSizes:
        """Return the sizes of an unsharded built-in model."""
        mla, moe = config.mla, config.moe
        attention_input = (mla.query_rank or config.width) + mla.kv_rank + mla.rope_dim if mla else 0
        moe_layers = [layer for layer in range(config.layers) if moe and moe.is_moe_layer(layer)]
        return cls(
            layers=config.layers,
            width=config.width,
            batch=batch,
            seq_len=seq_len,
            dropout=config.dropout > 0,
            element_bytes=element_bytes,
            loss_bytes=max(element_bytes, 4),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            attention_input_width=attention_input,
            moe_layers=len(moe_layers),
            first_moe_layer=min(moe_layers, default=None),
            has_shared_expert=bool(moe and moe.shared_ffn),
            causal=config.causal,
        )


def collectives(
    t: TransformerSizes, layout: Layout, recomputed: RecomputedLayers | None = None, *, partition: bool = False
) -> Iterable[Collective]:
    """Yield the collectives that one step of a transformer issues over tp, without `partial_grad_collectives`.

    `recomputed` overrides the layers that the layout recomputes; with `partition` their saved inputs are gathered.
    """
    if layout.tp == 1:
        return
    steps = layout.accumulate
    recomputed = recomputed or RecomputedLayers.from_policy(layout.recompute, layers=t.layers, moe_layers=t.moe_layers)
    dense, shared = t.layers - t.moe_layers, t.moe_layers * t.has_shared_expert
    recomputed_shared = recomputed.moe * t.has_shared_expert
    # Crossings of regions in a microbatch's forward, by elements per token; backward crosses them too.
    enter = _region_inputs(t, t.layers, dense + shared) + Counter({t.width: t.has_head})
    leave = Counter({t.width: t.layers + dense + shared + t.has_embedding})
    enter_backward, leave_backward = enter.copy(), leave.copy()
    if t.frozen_inputs and t.has_embedding:
        leave_backward[t.width] -= 1
        enter_backward[t.width] -= not t.attention_input_width  # latents are made by linears with adapters
    # Recomputing a block enters both regions again and leaves its first one. It leaves its last region only if
    # another block is recomputed after it, dropout needs the result, or experts follow.
    last = recomputed.dense if t.dropout else recomputed.dense - recomputed.dense_tails
    reenter = _region_inputs(t, recomputed.layers, recomputed.dense + recomputed_shared)
    releave = Counter({t.width: recomputed.layers + last + recomputed_shared})
    if partition and recomputed.segments:
        size = partition_numel(t.batch * t.seq_len * t.width, layout.tp) * layout.tp * t.element_bytes
        count = recomputed.segments * steps
        yield Collective(op="all_gather", axis="tp", bytes=size, count=count, purpose="saved inputs")
    # Entering is an all-gather in forward and a reduce-scatter in backward, or (sp=0) an all-reduce in backward;
    # leaving is the reverse.
    if layout.sp:
        gathered, scattered = enter + leave_backward + reenter, leave + enter_backward + releave
        yield from sequence_parallel_collectives(t, layout, gathered, scattered)
    else:
        for elements, count in (leave + enter_backward + releave).items():
            size = t.batch * t.seq_len * elements * t.element_bytes
            yield Collective(op="all_reduce", axis="tp", bytes=size, count=count * steps, purpose="activations")
    if not t.has_head:
        return
    numbers = 2 * layout.tp * t.batch * t.seq_len * t.loss_bytes
    yield Collective(op="all_gather", axis="tp", bytes=numbers, count=steps, purpose="loss")


def _region_inputs(t: TransformerSizes, attentions: int, mlps: int) -> Counter[int]:
    counts = Counter({t.width: mlps})
    counts[t.attention_input_width or t.width] += attentions
    return counts


def sequence_parallel_collectives(
    t: TransformerSizes, layout: Layout, gathered: Mapping[int, int], scattered: Mapping[int, int]
) -> Iterable[Collective]:
    """Yield a step's all-gathers and reduce-scatters of activations, from counts per microbatch by elements a token."""
    tokens = t.batch * -(-t.seq_len // layout.tp) * layout.tp
    for op, counts in (("all_gather", gathered), ("reduce_scatter", scattered)):
        for elements, count in counts.items():
            size = tokens * elements * t.element_bytes
            yield Collective(op=op, axis="tp", bytes=size, count=count * layout.accumulate, purpose="activations")


def partial_grad_collectives(
    groups: Iterable[ParamGroupSpec], reduce_bytes: int, shard_index: Callable[[ParamGroupSpec], int] = lambda _: 0
) -> Iterable[Collective]:
    """Yield one all-reduce per step and axis for gradients of which each rank holds a partial sum."""
    sizes: dict[str, int] = {}
    for group in groups:
        for param in group.params:
            for axis in param.partial_grad_axes:
                start, stop = group.shard_interval(param, shard_index(group))
                sizes[axis] = sizes.get(axis, 0) + (stop - start) * group.element_bytes(reduce_bytes)
    for axis, size in sizes.items():
        if size:
            yield Collective(op="all_reduce", axis=axis, bytes=size, purpose="partial gradients")
