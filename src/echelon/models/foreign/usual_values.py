"""What code that reads values finds where there are none: on the meta device, for the probe of layers.

Models ask whether a batch is padded or packed, and which experts have tokens. `UsualValues` answers as for a plain
batch: all masks are set, nothing is padded, and the first of many has a token. Planning, which counts what runs, does
not ask for the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ALL, _ANY = (Tensor.all, torch.all), (Tensor.any, torch.any)
_NONZERO = (Tensor.nonzero, torch.nonzero)


class UsualValues(TorchFunctionMode):
    """Lets code read tensors on the meta device."""

    def __init__(self, *, finds_indices: bool = True) -> None:
        super().__init__()
        self.finds_indices = finds_indices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return func(*args, **(kwargs or {}))
        if func in (*_ALL, *_ANY) and len(args) == 1 and not kwargs:
            return torch.tensor(func in _ALL)
        if func in (Tensor.__contains__, Tensor.__bool__):
            return False
        if func is Tensor.item:
            return 0
        if not self.finds_indices:
            return func(*args, **(kwargs or {}))
        if func in _NONZERO:
            found = torch.zeros(1, first.dim(), dtype=torch.int64, device="meta")
            return found.unbind(1) if (kwargs or {}).get("as_tuple") else found
        if func is torch.where and len(args) == 1:
            return torch.zeros(first.dim(), 1, dtype=torch.int64, device="meta").unbind(0)
        return func(*args, **(kwargs or {}))
