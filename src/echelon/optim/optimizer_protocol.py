"""What an engine asks of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from echelon.layout.collective import Collective

if TYPE_CHECKING:
    from echelon.optim.optimizer_state import OptimizerState


class ShardedOptimizer(Protocol):
    """A rule over some units' shards of one rank."""

    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        """One update with gradients times `scale` (float64); none at all, of nothing, where `live` is false.

        Both are on the device, and stay there where the device is a GPU. Gradients may be left multiplied by `scale`.
        """
        ...

    def states(self) -> list[Tensor]:
        """Everything that is kept from step to step, counts of steps too."""
        ...

    def named_states(self) -> Iterable[OptimizerState]:
        """The same by name and parameter, also before the first step."""
        ...

    def collectives(self) -> list[Collective]:
        """What a step of it sends."""
        ...
