"""One update for each unit, so that each can run as soon as its gradients are there (train/in_backward.py)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from echelon.layout.cost import Collective
from echelon.optim.choose import sharded
from echelon.optim.kept import Kept
from echelon.optim.rule import Rule
from echelon.optim.update import Update
from echelon.parallel.apply import Parallel
from echelon.parallel.flat_unit import FlatUnit


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
