"""Custom models as text, `file.py:factory`: every rank loads the file and calls the function."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.input_file import read_bytes
from echelon.layout.validation_error import ValidationIssue, did_you_mean
from echelon.models.foreign.hf_source import is_hf_model


def is_user_model(spec: str) -> bool:
    """Whether a model is given as `file.py:factory`."""
    return ":" in spec and not is_hf_model(spec)


def validate_spec(spec: str, *, key: str = "model", legal: str = "file.py:factory") -> Iterator[ValidationIssue]:
    """Issues of `file.py:name` that show without running the file, which may take seconds."""
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        yield ValidationIssue(key=key, value=spec, message="names no Python file", legal=legal)
        return
    try:
        tree = ast.parse(read_bytes(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: it is nested too deep
        yield ValidationIssue(key=key, value=spec, message=f"cannot be read as Python ({error})", legal=legal)
        return
    names = set(_defined_names(tree))
    if name not in names and "*" not in names:
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        message, hint = f"names nothing in the file (no {name!r} in {path})", did_you_mean(name, defined)
        yield ValidationIssue(key=key, value=spec, message=message, legal=", ".join(defined), hint=hint)


def _defined_names(tree: ast.AST) -> Iterator[str]:
    """Every name that the file may define, on any branch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


USER_MODULE_PREFIX = "echelon_user_"
"""prefix of user files in `sys.modules`"""
PATH_MODULES = ("pathlib", "os", "posixpath", "genericpath", "shutil")
"""modules that raise for a path that Echelon gave them"""


def is_refusal(modules: Sequence[str]) -> bool:
    """Whether Echelon's own code raised, and no user's model or library, whose traceback is needed."""
    raised = [name for name in modules if name not in PATH_MODULES][-1:]
    ours = bool(raised) and raised[0].partition(".")[0] == "echelon"
    return ours and not any(name.startswith(USER_MODULE_PREFIX) for name in modules)


def refuse_while_loading(verb: str) -> None:
    """Raise if a user file calls `verb` at import: every rank imports the file, and would call it again."""
    for frame in inspect.stack(context=0):
        name = frame.frame.f_globals.get("__name__", "")
        # multiprocessing imports the main program under the second name.
        if frame.function == "<module>" and (name.startswith(USER_MODULE_PREFIX) or name == "__mp_main__"):
            raise ValueError(
                f"{frame.filename} calls {verb} while a rank imports it to load the model; "
                'put the call under `if __name__ == "__main__":`'
            )


def load_factory(spec: str) -> Callable[..., Any]:
    """The function that `file.py:name` names."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ValueError(f"a custom model is named file.py:factory ({spec!r}); add the name of the function")
    module = _load_module(Path(path))
    if not hasattr(module, name):
        raise ValueError(
            f"{path} has no function {name!r}; it has {', '.join(n for n in vars(module) if not n.startswith('_'))}"
        )
    factory: Callable[..., Any] = getattr(module, name)
    return factory


def _load_module(path: Path) -> ModuleType:
    key = USER_MODULE_PREFIX + path.resolve().stem
    if key in sys.modules and getattr(sys.modules[key], "__file__", None) == str(path.resolve()):
        return sys.modules[key]
    if not path.is_file():
        raise ValueError(f"the file is missing ({path}); give the path of a Python file")
    spec = importlib.util.spec_from_file_location(key, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]  # a half-loaded module must not be reused
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def factory_spec(function: Callable[..., Any]) -> str:
    """`file.py:name` of a user's function, which ranks import."""
    path, name = inspect.getsourcefile(function), function.__qualname__
    if path is None or "<" in name or "." in name:
        raise ValueError(f"ranks must be able to import the function ({name}); define it at the top level of a file")
    return f"{path}:{name}"
