"""Modules that compute in float32 under a 16-bit compute dtype (`precision.keep_fp32`).

The parameters of a module that a pattern names, or that is inside one, are float32, in parameter groups of their own
(layout/placement.py). Its inputs are cast to float32, and its outputs to the compute dtype: only sums of losses, and a
router's decisions, stay as they are. A weight that is tied to one of these is float32 in all its uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import LogicalParam


def mark_fp32_entries(model: nn.Module, params: Iterable[LogicalParam], patterns: Sequence[str]) -> list[LogicalParam]:
    """Return the parameters, with `keep_fp32` set in modules that a pattern names; raise if a pattern names none."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if unmatched:
        raise ValueError(
            f"no module with parameters matches precision.keep_fp32 ({', '.join(unmatched)}); "
            f"the model has {', '.join(modules[:9])}{' ...' if len(modules) > 9 else ''}"
        )
    chosen = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return [
        replace(param, keep_fp32=any(name.startswith(module + ".") for name in param.names for module in chosen))
        for param in params
    ]


def fp32_modules(params: Iterable[LogicalParam]) -> set[str]:
    """Return the modules that hold fp32 parameters."""
    return {name.rpartition(".")[0] for param in params if param.keep_fp32 for name in param.names}


def compute_in_float32(model: nn.Module, names: Iterable[str], compute: torch.dtype) -> None:
    """Hook these modules: cast inputs to float32, and outputs to the compute dtype."""

    def before(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, compute, torch.float32), _cast(kwargs, compute, torch.float32)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(output, torch.float32, compute)

    for name in sorted(names):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype == source and value.dim() else value
    if isinstance(value, dict):
        return {key: _cast(item, source, target) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(item, source, target) for item in value)
    return value
