"""An update of weights without a master copy, which are rounded by chance: it counts for those who round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from echelon.layout.collective import Collective
from echelon.optim.optimizer_protocol import Update
from echelon.optim.optimizer_state import Kept, number_of_held
from echelon.optim.param_shards import Held


class Counted:
    """An update that counts for those who round; its `step` is that of their `Chance`."""

    def __init__(self, update: Update, step: Tensor, held: Sequence[Held]):
        self._update, self._step, self._held = update, step, held

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, live: Tensor) -> None:
        self._step += live
        self._update.step(lr, scale, live)

    def states(self) -> list[Tensor]:
        return [self._step, *self._update.states()]

    def kept(self) -> Iterator[Kept]:
        yield from number_of_held("rounding", self._held, self._step)
        yield from self._update.kept()

    def collectives(self) -> list[Collective]:
        return self._update.collectives()
