"""What a tensor grid costs: the collectives of every linear, norm, embedding and loss, to the byte. No torch.

A sharded module is described by its sizes on one rank, padding included. With n tokens on a rank (those of its own
sequences), q the grid's side and sizes in elements:

    linear, 2d       forward     q broadcasts of x's block over x and of W's over y
                     backward    q broadcasts of W's over y, q reductions of x's over x;
                                 q broadcasts of x's over x, q reductions of W's over y
    linear, 3d       forward     X gathered over one axis, W over z, Y scattered over the other
                     backward    dY and W gathered, dX scattered; X gathered, dW scattered

2.5d is 2d with fewer tokens on a rank; gradients of its replicated weights are summed over z once a step, with all
partial gradients (tp/cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.tp.cost import TransformerSizes, grid_shape, region_axis


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes of a linear layer."""

    inputs: int
    """on one rank, as all sizes here"""
    outputs: int
    source: str
    """the axis over which the input's columns are sharded"""
    target: str
    """the axis over which the output's columns are sharded"""
    shares_input: bool = False
    """another layer reads the same input, and communicates it for both"""


@dataclass(frozen=True)
class NormSizes:
    """Sizes of a norm."""

    reduced: int
    """numbers per token that are all-reduced: in forward if none are gathered, and in backward"""
    gathered: int
    """numbers per token that are all-gathered in forward"""


@dataclass(frozen=True)
class TableSizes:
    """Sizes of a table [vocabulary, width]."""

    rows: int
    columns: int


class EmbeddingSizes(TableSizes):
    """Sizes of an embedding."""


class HeadSizes(TableSizes):
    """Sizes of a language head with its loss."""


ModuleSizes = LinearSizes | NormSizes | EmbeddingSizes | HeadSizes

_PURPOSES: dict[type, str] = {LinearSizes: "linear", NormSizes: "norm", EmbeddingSizes: "embedding", HeadSizes: "head"}
CollectiveSize = tuple[str, str, int, int]
"""op, axis, elements, count"""
PassSizes = tuple[list[CollectiveSize], list[CollectiveSize]]
"""of forward and of backward"""


def linear_sizes(layout: Layout, inputs: int, outputs: int, *, leaves_region: bool, shares_input: bool) -> LinearSizes:
    """Return the sizes of a linear layer that enters a region, or leaves it."""
    side, region = grid_shape(layout).x, region_axis(layout)
    inputs, outputs = -(-inputs // side), -(-outputs // side)
    source, target = (region, "x") if leaves_region else ("x", region)
    return LinearSizes(inputs=inputs, outputs=outputs, source=source, target=target, shares_input=shares_input)


def embedding_and_head_sizes(layout: Layout, vocab_size: int, width: int) -> tuple[EmbeddingSizes, HeadSizes]:
    """Return the sizes of the embedding and of the language head."""
    side = grid_shape(layout).x
    sizes = -(-vocab_size // side), -(-width // side)
    return EmbeddingSizes(*sizes), HeadSizes(*sizes)


def collectives(
    modules: Iterable[tuple[ModuleSizes, int]], layout: Layout, sizes: TransformerSizes
) -> Iterator[Collective]:
    """Yield the collectives of a step for some modules, each with how often its forward is recomputed.

    Norm statistics have the dtype of the loss: they are never 16-bit.
    """
    grid = grid_shape(layout)
    tokens = grid.local_batch(sizes.batch) * sizes.seq_len
    for part, recomputations in modules:
        size = sizes.loss_bytes if isinstance(part, NormSizes) else sizes.element_bytes
        forward, backward = _collective_sizes(part, tokens, layout)
        for passes, items in ((1 + recomputations, forward), (1, backward)):
            for op, axis, elements, count in items:
                item = Collective(op=op, axis=axis, bytes=elements * size, purpose=_PURPOSES[type(part)])
                # Of several block transfers, all but one overlap the GEMM of another block.
                yield replace(item, count=passes * layout.accumulate)
                yield replace(item, count=(count - 1) * passes * layout.accumulate, overlapped=True)
        if isinstance(part, HeadSizes):
            size, axis = 2 * grid.x * tokens * sizes.loss_bytes, region_axis(layout)
            yield Collective(op="all_gather", axis=axis, bytes=size, count=layout.accumulate, purpose="loss")


def _collective_sizes(part: ModuleSizes, n: int, layout: Layout) -> PassSizes:
    """Return the collectives of n tokens on a rank."""
    if isinstance(part, NormSizes):
        reduced: CollectiveSize = ("all_reduce", "x", part.reduced * n, 1)
        gathered: CollectiveSize = ("all_gather", "x", grid_shape(layout).x * part.gathered * n, 1)
        return [gathered if part.gathered else reduced], [reduced]
    return (_cube_sizes if layout.tp_kind == "3d" else _summa_sizes)(part, n, grid_shape(layout).x)


def _summa_sizes(part: LinearSizes | EmbeddingSizes | HeadSizes, n: int, q: int) -> PassSizes:
    if isinstance(part, LinearSizes):
        x, weight = ("x", n * part.inputs, q), ("y", part.inputs * part.outputs, q)
        blocks = [weight] if part.shares_input else [x, weight]
        return [("broadcast", *b) for b in blocks], [(op, *b) for b in blocks for op in ("broadcast", "reduce")]
    table, logits = ("y", part.rows * part.columns, q), ("x", n * part.rows, q)
    if isinstance(part, EmbeddingSizes):
        return [("broadcast", *table)], [("reduce", *table)]
    backward: list[CollectiveSize] = [("broadcast", *logits), ("broadcast", *table), ("reduce", *table)]
    return [("broadcast", *table), ("reduce", *logits)], backward


def _cube_sizes(part: LinearSizes | EmbeddingSizes | HeadSizes, n: int, p: int) -> PassSizes:
    if isinstance(part, EmbeddingSizes):
        table, y = ("z", -(-part.rows // p) * p * part.columns, 1), ("y", p * n * part.columns, 1)
        return [("all_gather", *table), ("reduce_scatter", *y)], [("all_gather", *y), ("reduce_scatter", *table)]
    if isinstance(part, HeadSizes):
        part = LinearSizes(inputs=part.columns, outputs=part.rows, source="x", target="y")
    x, y = (part.target, p * n * part.inputs, 1), (part.source, p * n * part.outputs, 1)
    weight = ("z", -(-part.outputs // p) * p * part.inputs, 1)
    forward: list[CollectiveSize] = [("all_gather", *weight), ("reduce_scatter", *y)]
    backward: list[CollectiveSize] = [("all_gather", *y), ("all_gather", *weight), ("reduce_scatter", *weight)]
    if part.shares_input:
        return forward, backward
    return [("all_gather", *x), *forward], [*backward, ("all_gather", *x), ("reduce_scatter", *x)]
