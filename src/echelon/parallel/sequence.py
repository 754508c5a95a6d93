"""Megatron's sequence parallelism: between tensor-parallel regions each tp rank holds a slice of the sequence.

    sp=0   norm, dropout, residual: the whole sequence on every rank         enter: -            leave: all-reduce
    sp=1   norm, dropout, residual: one slice of the sequence per rank       enter: all-gather   leave: reduce-scatter

An all-reduce is a reduce-scatter followed by an all-gather, so the bytes moved stay the same, while the activations
kept between regions shrink by tp. Norm weights, row-split biases and positions then see only a slice of the tokens:
their gradients are parts, summed over tp once a step (`Entry.sum_over`). A sequence that tp does not divide is padded
outside the regions and trimmed inside them, so padding meets neither attention nor loss. The code is in regions.py
(`Sliced`).
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.layout import Layout
from echelon.layout.cost import Collective


def boundary_collectives(
    layers: int, layout: Layout, batch: int, seq_len: int, row_bytes: int, dropout: bool, *, ends: int = 2
) -> Iterable[Collective]:
    """Gathers and scatters of activations in a step: two of each per layer and pass, and one per end of the model.

    `ends` says how many of embedding and head this rank has.
    """
    padded = -(-seq_len // layout.tp) * layout.tp
    size = batch * padded * row_bytes
    full = layout.recompute == "full"
    # Recomputing a block repeats both gathers and the first scatter; the second only when dropout after it needs its
    # result.
    gathers = (4 + 2 * full) * layers + ends
    scatters = (4 + (1 + dropout) * full) * layers + ends
    for kind, count in (("all_gather", gathers), ("reduce_scatter", scatters)):
        yield Collective(kind=kind, axis="tp", bytes=size, count=count * layout.accumulate, part="activations")
