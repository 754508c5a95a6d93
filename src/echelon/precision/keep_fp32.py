"""Modules that compute in float32 beside a 16-bit compute type.

A module that a pattern names, or that lies inside one, has its parameters in float32, in flat units of their own
(layout/placement.py). It is given its inputs in float32, and what it gives goes on in the compute type: only sums of
losses, and what a gate decided, stay as they are. A weight that is tied to one of these is in float32 in all its uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import LogicalParam


def mark_fp32_entries(model: nn.Module, entries: Iterable[LogicalParam], patterns: Sequence[str]) -> list[LogicalParam]:
    """The entries; those of the modules that the patterns name are wide. A pattern that names nothing is an error."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    missed = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if missed:
        raise ValueError(
            f"no module with parameters matches precision.keep_fp32 ({', '.join(missed)}); "
            f"the model has {', '.join(modules[:9])}{' ...' if len(modules) > 9 else ''}"
        )
    chosen = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return [
        replace(entry, keep_fp32=any(name.startswith(module + ".") for name in entry.names for module in chosen))
        for entry in entries
    ]


def fp32_modules(entries: Iterable[LogicalParam]) -> set[str]:
    """The modules that hold wide parameters."""
    return {name.rpartition(".")[0] for entry in entries if entry.keep_fp32 for name in entry.names}


def compute_in_float32(model: nn.Module, names: Iterable[str], compute: torch.dtype) -> None:
    """Hooks on these modules: inputs come in float32, outputs go in the compute type."""

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
