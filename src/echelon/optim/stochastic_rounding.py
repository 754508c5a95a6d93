"""Stochastic rounding of bfloat16 weights that have no fp32 master weights (`precision.master=none`).

The arithmetic is in kernels/optim/stochastic_round.py. The random bits are a function of the parameter, the element's
index in the full parameter and the number of updates, so every layout rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
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
from echelon.layout.collective import Collective
from echelon.layout.placement import Piece
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, shard_counts

if TYPE_CHECKING:
    from echelon.optim.param_shards import ParamShard


@dataclass(frozen=True, eq=False)
class StochasticRounding:
    """Stochastic rounding of the elements of one parameter."""

    indices: ElementIndices
    step: Tensor
    """number of updates, including the current one"""

    def round_values(self, values: Tensor, start: int) -> Tensor:
        """Round flat values of the elements from `start` on to bfloat16. Representable values do not change."""
        if dispatch.use_triton_update(values.device, values.dtype):
            from echelon.kernels.optim import weight_formats_triton

            return weight_formats_triton.stochastic_round(values, self.indices.advance(start), self.step)
        bits = random_bits(len(values), self.indices.advance(start), self.step)
        return stochastic_round(values, second_hash_bits(bits))


def parameter_indices(piece: Piece, seed: int) -> ElementIndices:
    """Return the indices of a piece's elements in its full parameter."""
    param = piece.param
    dims = [(1, 1, 0)] * 3 + [
        (local, full, low) for local, full, (low, _) in zip(param.local_shape, param.shape, piece.box, strict=True)
    ]
    index = len(dims) - 1
    while index > 0 and len(dims) > 3:  # merge a dim that is not split into the one before it
        (local, full, low), (inner, size, _) = dims[index - 1], dims[index]
        if inner == size:
            dims[index - 1 : index + 1] = [(local * inner, full * size, low * size)]
        index -= 1
    assert len(dims) == 3, "at most two dims of a parameter are split"
    (_, _, outer), (middle, rows, low), (inner, columns, first) = dims
    return ElementIndices(
        start=piece.start,
        key=rng.key(seed, f"rounding {param.name}") & MASK32,
        sizes=(middle, inner),
        strides=(rows * columns, columns),
        base=(outer * rows + low) * columns + first,
    )


class StochasticRoundingOptimizer(ShardedOptimizer):
    """Wraps an optimizer to count its updates: `step` is that of the shards' `StochasticRounding`."""

    def __init__(self, optimizer: ShardedOptimizer, step: Tensor, shards: Sequence[ParamShard]):
        self._optimizer, self._step, self._shards = optimizer, step, shards

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        self._step += do_update
        self._optimizer.step(lr, grad_scale, do_update)

    def states(self) -> list[Tensor]:
        return [self._step, *self._optimizer.states()]

    def named_states(self) -> Iterator[OptimizerState]:
        yield from shard_counts("rounding", self._shards, self._step)
        yield from self._optimizer.named_states()

    def collectives(self) -> list[Collective]:
        return self._optimizer.collectives()
