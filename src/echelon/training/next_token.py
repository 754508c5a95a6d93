"""What a language model says comes next, in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def logits(engine: Engine, tokens: Tensor, size: int) -> Tensor:
    """float64 [size]: after the last token of the only row, on every rank."""
    model: Any = engine.model
    context = engine.parallel.context
    if engine.pipeline is not None:
        return engine.pipeline.logits({"tokens": tokens}, size)
    if context is not None:
        found = context.last(model.logits(**context.cut({"tokens": tokens}, counted=False)))
    else:
        found = model.logits(tokens)[:, -1]
    said: Tensor = found[0, :size].double()
    return said
