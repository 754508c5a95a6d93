"""Stubs for packages that a peer imports and its model code never calls.

torchtitan's model files import its data loading, its command line and its trackers. Where these are not installed, a
stub module takes their place: each of its attributes is a class that works as a base, a decorator or a type.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any


class _StubMeta(type):
    """The metaclass of stub classes: their attributes are stubs too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stub(name)


def make_stub(name: str) -> Any:
    def decorated(_self: Any, function: Any = None, *_args: Any, **_options: Any) -> Any:
        return function

    body: dict[str, Any] = {
        "__init__": lambda self, *args, **options: None,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__call__": decorated,
        "__getattr__": lambda self, attribute: make_stub(attribute),
    }
    return _StubMeta(name, (), body)


class _StubModule(types.ModuleType):
    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []  # a package, so that submodules can be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, make_stub(name))
        return self.__dict__[name]


def stub_missing_modules(names: Sequence[str]) -> None:
    """Put a stub in the place of each module that cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # a broken package counts as missing
            sys.modules[name] = _StubModule(name)
