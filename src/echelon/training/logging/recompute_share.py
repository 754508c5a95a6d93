"""What an engine's recomputation does again, as shares of the layers: HFU counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.memory.checkpointing.cost import Repeats, repeats
from echelon.memory.checkpointing.memory_budget import Budgeted
from echelon.models.model_config import ModelConfig

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def repeats_of(engine: Engine) -> Repeats:
    found, layout = engine.parallel.recomputed, engine.layout
    if isinstance(found, Budgeted):
        return found.repeats
    shape = getattr(engine.model, "config", None)
    # With dropout on them, probabilities are written out.
    written_out = isinstance(shape, ModelConfig) and shape.dropout > 0 and layout.cp == 1
    layers = max(len(found.forms), 1)
    return repeats(layout.recompute, layers=layers, whole=1.0, entry=0.0, written_out=written_out)
