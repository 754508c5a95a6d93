"""The interface between the engine and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        """Return the collectives of one step: none, unless the optimizer overrides this."""
        return []


class CombinedOptimizer(ShardedOptimizer):
    """Optimizers of different parameter groups of a rank, as one."""

    def __init__(self, optimizers: Sequence[ShardedOptimizer]):
        self.optimizers = optimizers

    def step(self, lr: float, grad_scale: Tensor, do_update: Tensor) -> None:
        # The last first: the host's, which only submits its work.
        for optimizer in reversed(self.optimizers):
            optimizer.step(lr, grad_scale, do_update)

    def states(self) -> list[Tensor]:
        return [state for optimizer in self.optimizers for state in optimizer.states()]

    def named_states(self) -> Iterator[OptimizerState]:
        return (state for optimizer in self.optimizers for state in optimizer.named_states())

    def collectives(self) -> list[Collective]:
        return [collective for optimizer in self.optimizers for collective in optimizer.collectives()]
