"""Copies of a module, without its hooks, in which other modules stand in for some of its own.

A copy shares everything else with the module. It is made anew at each use, since parallelism replaces modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Call = Callable[..., Any]


class PartReached(Exception):  # noqa: N818
    """Ends a forward at a stub: no error, but the end of a part."""


class Stub(nn.Module):
    """Stands in for a layer."""

    def __init__(self, call: Call, attributes: Mapping[str, Any]):
        super().__init__()
        self.__dict__.update(attributes)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a layer that a forward may read where the layer itself is elsewhere."""
    plain = (int, float, str, bool, type(None))
    return {key: value for key, value in vars(module).items() if isinstance(value, plain) and not key.startswith("_")}


def shallow_copy(module: nn.Module) -> nn.Module:
    """The same module without its hooks, whose children can be replaced without changing the original."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__ = dict(module.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        copied.__dict__[name] = dict(module.__dict__[name])
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            copied.__dict__[name] = OrderedDict()
    return copied


def make_shell(model: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A shallow copy of a model with other modules at these names."""
    shell = shallow_copy(model)
    copied = {"": shell}
    for path, module in replaced.items():
        parent = ""
        for name in path.split(".")[:-1]:
            child = f"{parent}.{name}" if parent else name
            if child not in copied:
                inner = copied[parent]._modules[name]
                assert inner is not None
                copied[child] = copied[parent]._modules[name] = shallow_copy(inner)
            parent = child
        copied[parent]._modules[path.rpartition(".")[2]] = module
    return shell
