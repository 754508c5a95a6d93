"""Stand-ins for packages that a peer imports at its top and its model code never calls.

torchtitan's model files import its data loading, its command line and its trackers. Where these are not installed, an
empty module stands in: whatever is asked of it is a class that accepts any use as a base, a decorator or a type.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any


class _StubMeta(type):
    """The class of stand-in classes: their attributes are stand-ins too."""

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
        self.__path__ = []  # a package: modules below it can be asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, make_stub(name))
        return self.__dict__[name]


def stub_missing_modules(names: Sequence[str]) -> None:
    """Puts a stand-in in the place of each module that cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # a package that is there and broken is as good as absent
            sys.modules[name] = _StubModule(name)
