"""Whether a class of transformers keeps packed documents apart, given positions that begin again with each of them.

Many classes find documents in the positions, and mask attention between them. Others let a token attend to all before
it, whatever their positions are, or have states that no mask divides: these are given no documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echelon.models.foreign.layer_probe import implementations
from echelon.models.foreign.layer_stack import LayerCall, LayerStack

FIRST, SECOND = 3, 3
"""tokens of two documents"""
HIDDEN = -1e4
"""a number that is added to scores of hidden keys is less"""


def keeps_documents_apart(model: Any, stack: LayerStack) -> bool:
    """Whether every layer is given a mask between two documents. The model's weights may be on the meta device."""
    if not stack.takes_positions:
        return False
    like = torch.zeros(1, FIRST + SECOND, stack.embedding_size)
    positions = torch.tensor([[*range(FIRST), *range(SECOND)]])
    with torch.no_grad(), implementations(model.config, attention="eager"):
        try:
            calls = stack.contexts(model, like, position_ids=positions)
        except Exception:  # whatever a class raises for positions that it does not expect
            return False
    return all(_is_divided(call) for call in calls)


def _is_divided(call: LayerCall) -> bool:
    size = FIRST + SECOND
    values = (*call.args, *call.kwargs.values())
    masks = [x for x in values if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-2:] == (size, size)]
    hidden = (mask.logical_not() if mask.dtype == torch.bool else mask < HIDDEN for mask in masks)
    return any(bool(mask[..., FIRST:, :FIRST].all()) for mask in hidden)
