"""Dropout of a traced model: training replaces it (rng.py), by operators that save as much as torch's own.

The mask of `rng.Dropout` is computed from counters in integers, by one kernel on CUDA. Tracing would count its
operators one by one, as it would those of `nn.Dropout` on the meta device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from echelon.rng import Dropout, RandomStream

if TYPE_CHECKING:
    from torch import Tensor


class TracedDropout(Dropout):
    """Dropout in one operator that saves a mask."""

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = torch.native_dropout(x, self.p, train=True)[0] if self.p else x
        return dropped


def replace_dropouts(model: nn.Module) -> None:
    """Replace every `nn.Dropout`, as training does."""
    stream = RandomStream(0)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, TracedDropout(child.p, name, stream).train())
