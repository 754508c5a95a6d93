"""`tp_strategy`: the one hook through which the core reaches a kind of tensor parallelism, tensor grids included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from echelon.layout import Layout
    from echelon.layout.collective import Collective
    from echelon.memory.checkpointing.cost import RecomputedLayers
    from echelon.parallel.parallel_model import ParallelModel
    from echelon.parallel.tp.cost import TransformerSizes
    from echelon.parallel.transform_context import TransformContext


class TensorParallelStrategy(Protocol):
    """A module that implements one or several values of `tp_kind`."""

    def apply_tensor_parallel(self, context: TransformContext) -> None:
        """Shard the model's modules and parameters over tp."""

    def check_matmul_precision(self, layout: Layout, recipe: str) -> None:
        """Raise ValueError if the kind cannot multiply in a precision."""

    def model_collectives(
        self, parallel: ParallelModel, sizes: TransformerSizes, recomputed: RecomputedLayers
    ) -> Iterable[Collective]:
        """Yield the collectives of a step of a sharded model over tp."""


def tp_strategy(layout: Layout) -> TensorParallelStrategy:
    """Return the module that implements the layout's `tp_kind`."""
    if layout.tp_kind == "1d":
        from echelon.parallel.tp import tensor_parallel

        return tensor_parallel
    from echelon.parallel.tp_grid import grid_parallel

    return grid_parallel
