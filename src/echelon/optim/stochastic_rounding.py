"""Weights without a master copy: what an update makes of them is rounded up or down by chance (kernels/optim/fused_adamw.py).

The random bits are of the parameter, the element's place in it and the number of updates, so every layout rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from echelon import rng
from echelon.kernels import dispatch
from echelon.kernels.optim.stochastic_round import (
    MASK32,
    ElementIndices,
    random_bits,
    second_hash_bits,
    stochastic_round,
)
from echelon.layout.placement import Piece


@dataclass(frozen=True, eq=False)
class StochasticRounding:
    """How elements of one parameter are rounded."""

    indices: ElementIndices
    step: Tensor
    """number of updates, this one among them"""

    def round_values(self, values: Tensor, start: int) -> Tensor:
        """Flat values of the elements from `start` on. Those that need no rounding stay what they are."""
        if dispatch.use_triton_update(values.device, values.dtype):
            from echelon.kernels.optim import split_fp32_triton

            return split_fp32_triton.stochastic_round(values, self.indices.advance(start), self.step)
        bits = random_bits(len(values), self.indices.advance(start), self.step)
        return stochastic_round(values, second_hash_bits(bits))


def parameter_indices(piece: Piece, seed: int) -> ElementIndices:
    """Where a piece lies in its whole parameter, for random numbers."""
    entry = piece.param
    dims = [(1, 1, 0)] * 3 + [
        (local, whole, low) for local, whole, (low, _) in zip(entry.local_shape, entry.shape, piece.box, strict=True)
    ]
    index = len(dims) - 1
    while index > 0 and len(dims) > 3:  # a dim that is whole is a part of the one before it
        (local, whole, low), (inner, size, _) = dims[index - 1], dims[index]
        if inner == size:
            dims[index - 1 : index + 1] = [(local * inner, whole * size, low * size)]
        index -= 1
    assert len(dims) == 3, "at most two dims of a parameter are cut"
    (_, _, outer), (middle, rows, low), (inner, columns, first) = dims
    key = rng.key(seed, f"rounding {entry.name}") & MASK32
    return ElementIndices(
        start=piece.start,
        key=key,
        sizes=(middle, inner),
        strides=(rows * columns, columns),
        base=(outer * rows + low) * columns + first,
    )
