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

from collections.abc import Iterable, Mapping

from echelon.layout import Layout
from echelon.layout.collective import Collective


def sequence_parallel_collectives(
    layout: Layout,
    batch: int,
    seq_len: int,
    element_bytes: int,
    gathered: Mapping[int, int],
    scattered: Mapping[int, int],
) -> Iterable[Collective]:
    """Gathers and scatters of activations in a step, given how many of a microbatch are of so many elements a token."""
    tokens = batch * -(-seq_len // layout.tp) * layout.tp
    for kind, counts in (("all_gather", gathered), ("reduce_scatter", scattered)):
        for elements, count in counts.items():
            size = tokens * elements * element_bytes
            yield Collective(op=kind, axis="tp", bytes=size, count=count * layout.accumulate, purpose="activations")
