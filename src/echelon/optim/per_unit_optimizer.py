"""One update for each unit, so that each can run as soon as its gradients are there (training/optimizer_in_backward.py)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_factory import sharded
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept
from echelon.optim.update_rule import Rule
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.param_group import FlatUnit


class InTurn:
    def __init__(self, parallel: Parallel, rule: Rule):
        self._parts: dict[FlatUnit, Update] = {unit: sharded(parallel, rule, [unit]) for unit in parallel.flat.units}

    def of(self, unit: FlatUnit) -> Update:
        return self._parts[unit]

    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        for part in self._parts.values():
            part.step(lr, scale, live)

    def states(self) -> list[Tensor]:
        return [state for part in self._parts.values() for state in part.states()]

    def kept(self) -> Iterator[Kept]:
        return (state for part in self._parts.values() for state in part.kept())

    def collectives(self) -> list[Collective]:
        return [found for part in self._parts.values() for found in part.collectives()]
