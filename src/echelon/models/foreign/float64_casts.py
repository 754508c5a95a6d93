"""Code that casts to float32 by name, run in float64 throughout.

Norms, rotary tables, routers and softmax of many models say `.float()` or `dtype=torch.float32`: in a float64 model
these round to 24 bits, and two layouts of the same model then differ by 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WidenToFloat64(TorchFunctionMode):
    """Turn every cast to float32 into one to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        if func is torch.full and "dtype" not in (kwargs or {}) and isinstance(args[-1], float):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}  # the least float64 is no float32
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64_casts(dtype: torch.dtype) -> Iterator[None]:
    """Widen casts to float32 while a model of this dtype runs, if it is float64."""
    if dtype != torch.float64:
        yield
        return
    with WidenToFloat64():
        yield
