"""An update of weights without a master copy, which are rounded by chance: it counts for those who round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState, shard_counts
from echelon.optim.param_shards import ParamShard


class StochasticRoundingOptimizer:
    """An update that counts for those who round; its `step` is that of their `Chance`."""

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
