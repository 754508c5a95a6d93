"""One update for each unit, so that each can run as soon as its gradients are there (training/step_strategies.py)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.optimizer_state import OptimizerState
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel


class PerGroupOptimizer:
    def __init__(self, parallel: ParallelModel, rule: UpdateRule):
        self._optimizers: dict[ParamGroup, ShardedOptimizer] = {
            unit: build_optimizer(parallel, rule, [unit]) for unit in parallel.sharded_model.param_groups
        }

    def optimizer_of(self, param_group: ParamGroup) -> ShardedOptimizer:
        return self._optimizers[param_group]

    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        for part in self._optimizers.values():
            part.step(lr, grad_scale, do_update)

    def states(self) -> list[Tensor]:
        return [state for part in self._optimizers.values() for state in part.states()]

    def named_states(self) -> Iterator[OptimizerState]:
        return (state for part in self._optimizers.values() for state in part.named_states())

    def collectives(self) -> list[Collective]:
        return [found for part in self._optimizers.values() for found in part.collectives()]
