"""The layers of a model: what its lists of modules hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """Return the model's layers: the elements of its outermost module lists, or its children if it has no list."""
    return listed_layers(model) or tuple(name for name, _ in model.named_children())


def listed_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the elements of the model's outermost module lists."""
    names = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if type(module).__name__ in ("ModuleList", "Sequential")
        for key, _ in module.named_children()
    ]
    return tuple(outermost(names))


def outermost(names: Iterable[str]) -> list[str]:
    """Return the names of modules that are inside no other of them."""
    names = list(names)
    return [name for name in names if not any(name.startswith(other + ".") for other in names)]
