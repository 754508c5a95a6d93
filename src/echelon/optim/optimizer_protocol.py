"""The interface between the engine and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from echelon.layout.collective import Collective

if TYPE_CHECKING:
    from echelon.optim.optimizer_state import OptimizerState


class ShardedOptimizer(Protocol):
    """An optimizer of one rank's shards of parameter groups."""

    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        """Update with gradients times `grad_scale` (float64); change nothing where `do_update` is false.

        Both are tensors on the device, and a GPU implementation does not copy them to the host. Gradients may be left
        multiplied by `grad_scale`.
        """
        ...

    def states(self) -> list[Tensor]:
        """Return all state tensors, step counts too."""
        ...

    def named_states(self) -> Iterable[OptimizerState]:
        """Return the states by name and parameter, also before the first step."""
        ...

    def collectives(self) -> list[Collective]:
        """Return the collectives of one step."""
        ...
