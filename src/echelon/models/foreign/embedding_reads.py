"""Whether a class of transformers gives its layers something of the embedding beside their input.

A forward in parts makes the arguments of layers from zeros in place of embeddings (layer_stack.py), on stages that have
none. That is right if no argument depends on them: two other embeddings must give the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.models.foreign.layer_probe import implementations
from echelon.models.foreign.layer_stack import LayerStack

ROWS, TOKENS = 2, 4


def reads_embedding(model: Any, stack: LayerStack) -> bool:
    """Whether arguments of layers follow from the embedding. The model's weights may be on the meta device."""
    generator = torch.Generator().manual_seed(4)
    zeros = torch.zeros(ROWS, TOKENS, stack.embedding_size)
    with torch.no_grad(), implementations(model.config, attention="eager"):
        try:
            calls = [stack.contexts(model, like) for like in (zeros, torch.randn(zeros.shape, generator=generator))]
        except Exception:  # what reads values of weights cannot run here
            return False
    one, other = (list(_tensors([(call.args, call.kwargs) for call in of_layers])) for of_layers in calls)
    return len(one) != len(other) or not all(map(_equal, one, other))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or bool(torch.equal(a, b)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
