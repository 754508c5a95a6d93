"""Code that casts to float32 by name, run in float64 throughout.

Norms, rotary tables, routers and softmax of many models say `.float()` or `dtype=torch.float32`: in a float64 model
these round to 24 bits, and two layouts of the same model then differ by 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.models.layer_lists import listed_layers


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


class WidenedModule(nn.Module):
    """What `widen_casts` adds to the class of a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with WidenToFloat64():
            return super().forward(*args, **kwargs)


def widen_casts(model: nn.Module) -> nn.Module:
    """Let a float64 model and its layers, which backward may recompute alone, run in float64 throughout."""
    from echelon.models.foreign.causal_lm import ForeignCausalLM, derive_class  # imports this module

    if isinstance(model, ForeignCausalLM):  # which does that itself
        return model
    for name in ("", *listed_layers(model)):
        derive_class(model.get_submodule(name), WidenedModule)
    return model
