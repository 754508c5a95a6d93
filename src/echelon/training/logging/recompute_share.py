"""What an engine's recomputation does again, as shares of the layers: HFU counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.memory.checkpointing.cost import RecomputeWork, recompute_work
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.models.model_config import ModelConfig

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def recompute_shares(engine: Engine) -> RecomputeWork:
    found, layout = engine.parallel.checkpointing, engine.layout
    if isinstance(found, MemoryBudget):
        return found.recompute_work
    shape = getattr(engine.model, "config", None)
    # With dropout on them, probabilities are written out.
    written_out = isinstance(shape, ModelConfig) and shape.dropout > 0 and layout.cp == 1
    layers = max(len(found.forms), 1)
    return recompute_work(
        layout.recompute, layers=layers, layer_bytes=1.0, input_bytes=0.0, materialized_scores=written_out
    )
