"""Tensor parallelism over a grid of ranks in 2, 2.5 and 3 dimensions: its cost, for planning; plan only.

    2d      q x q ranks (SUMMA): every matrix in q x q blocks, which go along rows and columns, q steps a product
    2.5d    d layers of q x q: tokens divided over the layers too, weights copied in each
    3d      q x q x q: each matrix in blocks of two dimensions, gathered and scattered along the third

Nothing is held twice but 2.5d's weights, so activations shrink by all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.layout import Layout
from echelon.layout.cost import Collective


@dataclass(frozen=True)
class Grid:
    rows: float
    """ways that the tokens of one block are divided"""
    inputs: float
    outputs: float


def grid(layout: Layout) -> Grid:
    """How the three dimensions of a product are divided, each time that blocks are multiplied."""
    if layout.tp_kind == "3d":
        side = round(layout.tp ** (1 / 3))
        return Grid(rows=side, inputs=side, outputs=side)
    side = math.isqrt(layout.tp // layout.depth)
    return Grid(rows=side * layout.depth, inputs=side, outputs=side)


def collectives(
    layout: Layout, products: Sequence[tuple[float, float]], *, tokens: float, element_bytes: int
) -> Iterable[Collective]:
    """What a step issues for products of so many (inputs, outputs): each forward, and two like it backward."""
    passes = (4 if layout.recompute == "full" else 3) * layout.accumulate
    ranks = layout.tp
    if layout.tp_kind == "3d":
        side = round(ranks ** (1 / 3))
        for inputs, outputs in products:
            for elements in (tokens * inputs, inputs * outputs, tokens * outputs):
                gathered = int(elements * element_bytes / side**2)
                yield Collective(kind="all_gather", axis="tp", bytes=gathered, count=passes, part="blocks")
        return
    edge = math.isqrt(ranks // layout.depth)
    for inputs, outputs in products:
        block = tokens * inputs / ranks + inputs * outputs / edge**2
        moved = int(block * element_bytes * (edge - 1))
        yield Collective(kind="broadcast", axis="tp", bytes=moved, count=passes, part="blocks")
    if layout.depth > 1:
        weights = sum(inputs * outputs for inputs, outputs in products) / edge**2
        yield Collective(kind="all_reduce", axis="tp", bytes=int(weights * 4), part="weight gradients of layers")
