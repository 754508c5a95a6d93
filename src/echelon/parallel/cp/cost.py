"""Context parallelism: a rank holds a slice of every sequence, and attention reaches the others; what that costs.

    ring           keys and values go around the ranks, overlapped with attention (ring_attention.py)
                   under a window, straight to the ranks that reach them (window_attention.py)
    gather         they are all-gathered before attention, and their gradients scattered (all_gather_attention.py)
    ulysses        an all-to-all exchanges tokens for heads, so that attention has full sequences (ulysses.py)
    ring-ulysses   `ulysses` neighbours exchange heads, slices go around between their groups

All but attention works on single tokens and needs no change. Every rank gets full sequences, and computes positions and
documents before it shards them (context_parallel.py). Dropout masks are functions of the position in the full sequence.
Losses and token counts are partial and summed over cp as over dp, and so are gradients (dp/zero.py). A model can use cp
if its attention is an `echelon.CoreAttention` and its forward takes `positions`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.rules import head_parallel_size
from echelon.memory.checkpointing.cost import RecomputedLayers
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.parallel.tp.cost import TransformerSizes


@dataclass(frozen=True, kw_only=True)
class AttentionWidths:
    """Elements per token of attention on one tp rank."""

    queries: int
    """of all query heads"""
    keys_and_values: int
    """as they are sent: narrower values are padded to the keys (context_parallel.py)"""
    kv_heads: int
    results: int = 0
    """output of all query heads; 0: as queries"""

    @classmethod
    def per_rank(cls, num_ranks: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> AttentionWidths:
        """Return the widths on each of `num_ranks` ranks that divide the heads of a model."""
        local_kv_heads = max(kv_heads // num_ranks, 1)
        return cls(
            queries=heads * head_dim // num_ranks,
            keys_and_values=2 * local_kv_heads * head_dim,
            kv_heads=local_kv_heads,
            results=heads * value_dim // num_ranks,
        )


def tokens_per_rank(layout: Layout, seq_len: int) -> int:
    """Return the tokens of a sequence on one cp rank, padding included."""
    return ZigzagOrder(layout.cp // layout.ulysses, layout.ulysses, seq_len).padded_len // layout.cp


def transformer_collectives(
    sizes: TransformerSizes, layout: Layout, ring_index: int = -1, recomputed: RecomputedLayers | None = None
) -> Iterable[Collective]:
    """Yield the collectives of a step of a transformer over cp."""
    side, head_dim = head_parallel_size(layout) or 1, sizes.head_dim or sizes.width // sizes.heads
    value_dim = sizes.value_dim or head_dim
    return collectives(
        layout,
        AttentionWidths.per_rank(
            side, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=head_dim, value_dim=value_dim
        ),
        layers=sizes.layers,
        batch=-(-sizes.batch // (layout.tp // side)),  # a grid divides sequences by what it does not divide heads by
        seq_len=sizes.seq_len,
        element_bytes=sizes.element_bytes,
        causal=sizes.causal,
        ring_index=ring_index,
        recomputed=recomputed,
    )


def collectives(
    layout: Layout,
    widths: AttentionWidths,
    *,
    layers: int,
    batch: int,
    seq_len: int,
    element_bytes: int,
    causal: bool = True,
    window: int | None = None,
    ring_index: int = -1,
    recomputed: RecomputedLayers | None = None,
) -> Iterable[Collective]:
    """Yield the collectives of a step over cp; `batch` is the sequences of a microbatch.

    `recomputed` overrides the layout's recomputed layers. Under a causal mask a ring's ranks differ in the gradients
    they send: these are of the rank at `ring_index`, or of one in the middle. `window` is that of all layers.
    """
    if layout.cp == 1:
        return
    outer = layout.cp // layout.ulysses
    tokens = batch * tokens_per_rank(layout, seq_len)
    copies = lcm(layout.ulysses, widths.kv_heads) // widths.kv_heads  # to every rank with a query of theirs
    moved = tokens * widths.keys_and_values * copies
    num_attentions = layers * layout.accumulate
    recomputed = recomputed or RecomputedLayers.from_policy(layout.recompute, layers=layers)
    recomputed_layers = recomputed.layers * layout.accumulate
    recomputed_cores = recomputed_layers + recomputed.attention_cores * layout.accumulate
    if layout.ulysses > 1:
        axis = "ulysses" if outer > 1 else "cp"
        inputs, outputs = tokens * widths.queries + moved, tokens * (widths.results or widths.queries)
        # A core that is recomputed alone exchanges no output.
        for elements, recomputations in ((inputs, recomputed_cores), (outputs, recomputed_layers)):
            size, count = elements * element_bytes, 2 * num_attentions + recomputations
            yield Collective(op="all_to_all", axis=axis, bytes=size, count=count, purpose="heads")
    axis, size = "ring" if layout.ulysses > 1 else "cp", moved * element_bytes
    passes = 2 * num_attentions + recomputed_cores
    if layout.cp_kind == "gather":
        yield Collective(op="all_gather", axis=axis, bytes=outer * size, count=passes, purpose="keys and values")
        size = outer * moved * max(element_bytes, 4)
        yield Collective(op="reduce_scatter", axis=axis, bytes=size, count=num_attentions, purpose="their gradients")
    elif outer > 1 and causal and window is not None and window < seq_len:
        rank = ring_index if ring_index >= 0 else (outer - 1) // 2
        order = ZigzagOrder(outer, layout.ulysses, seq_len)
        yield from _window_sends(order, rank, window, axis, size, forward=passes, backward=num_attentions)
    elif outer > 1:
        send = Collective(op="send", axis=axis, bytes=size, overlapped=True, purpose="keys and values")
        yield replace(send, count=(outer - 1) * passes)
        # Gradients go back to their owners; of ranks with earlier tokens only half of the keys have gradients.
        earlier = (ring_index if ring_index >= 0 else (outer - 1) // 2) if causal else 0
        for kv_bytes, ranks in ((size // 2, earlier), (size, outer - 1 - earlier)):
            yield replace(send, bytes=kv_bytes, count=ranks * num_attentions, purpose="their gradients")


def gathered_collectives(
    layout: Layout,
    *,
    modules: int,
    batch: int,
    seq_len: int,
    width: int,
    element_bytes: int,
    recomputed: RecomputedLayers | None = None,
) -> Iterable[Collective]:
    """Yield the collectives of a step for modules that get full sequences, one of each layer (sequence_gather.py)."""
    if layout.cp == 1 or not modules:
        return
    size = batch * tokens_per_rank(layout, seq_len) * layout.cp * width * element_bytes
    recomputed = recomputed or RecomputedLayers.from_policy(layout.recompute, layers=modules)
    passes = (modules + recomputed.layers) * layout.accumulate
    yield Collective(op="all_gather", axis="cp", bytes=size, count=passes, purpose="full sequences")
    count = modules * layout.accumulate
    yield Collective(op="reduce_scatter", axis="cp", bytes=size, count=count, purpose="their gradients")


def _window_sends(
    order: ZigzagOrder, rank: int, window: int, axis: str, size: int, *, forward: int, backward: int
) -> Iterable[Collective]:
    """Yield what a rank sends to those that reach its keys, and back to those whose keys it reaches."""
    others = [other for other in range(order.ring_size) if other != rank]
    to = [order.window_keys(other, rank, window) for other in others]
    back = [order.window_keys(rank, other, window) for other in others]
    for keys, count, overlapped, purpose in (
        (to, forward, True, "keys and values"),
        (back, backward, False, "their gradients"),
    ):
        for span in keys:
            if sent := size * (span.stop - span.start) // (2 * order.chunk_len):
                yield Collective(op="send", axis=axis, bytes=sent, count=count, overlapped=overlapped, purpose=purpose)
