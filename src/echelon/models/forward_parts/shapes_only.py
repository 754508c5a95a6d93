"""Copies of modules and tensors that have shapes, but no memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModuleCopy:
    """A module whose tensors have shapes, but no memory."""

    module: nn.Module
    device: str
    """of its tensors: meta, or what fake tensors stand for"""
    buffers: Sequence[tuple[Tensor, Tensor]]
    """tensors that are not parameters, each with that of the original, which may have values"""


def copy_without_values(model: nn.Module, device: str = "meta", dtype: torch.dtype | None = None) -> ModuleCopy:
    """A copy in training mode, whose parameters may have another dtype. Shared tensors stay shared."""
    memo: dict[int, Any] = {}
    buffers: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        registered = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in (*registered, *(value for value in vars(module).values() if isinstance(value, Tensor))):
            if id(tensor) in memo:
                continue
            if isinstance(tensor, nn.Parameter):
                wanted = dtype if tensor.is_floating_point() else None
                empty = without_values(tensor, device, wanted)
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = without_values(tensor, device)
                if not tensor.is_meta:
                    buffers.append((memo[id(tensor)], tensor))
    return ModuleCopy(copy.deepcopy(model, memo).train(), device, buffers)


def without_values(tensor: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like another one on a device where it has no memory."""
    return torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False)
