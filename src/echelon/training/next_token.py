"""What a language model says comes next, in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from echelon.training.engine import Engine


def next_token_logits(engine: Engine, tokens: Tensor, vocab_size: int) -> Tensor:
    """float64 [size]: after the last token of the only row, on every rank."""
    model: Any = engine.model
    context = engine.parallel.cp_context
    if engine.pipeline is not None:
        return engine.pipeline.logits({"tokens": tokens}, vocab_size)
    if context is not None:
        found = context.last_token(model.logits(**context.shard_inputs({"tokens": tokens}, has_loss=False)))
    else:
        found = model.logits(tokens)[:, -1]
    said: Tensor = found[0, :vocab_size].double()
    return said
