"""A user's own module, named `file.py:factory`: text that travels to every rank, which then calls the function."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.layout.validation_error import ValidationIssue, did_you_mean


def is_user_model(spec: str) -> bool:
    """`file.py:factory`, a module of the user's own."""
    return ":" in spec


def validate_spec(spec: str, *, key: str = "model", legal: str = "file.py:factory") -> Iterator[ValidationIssue]:
    """What is wrong with `file.py:name`, as far as can be told without running the file: that may take seconds."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        yield ValidationIssue(key=key, value=spec, message="names no Python file", legal=legal)
        return
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        yield ValidationIssue(key=key, value=spec, message=f"cannot be read as Python ({error})", legal=legal)
        return
    names = set(_defined_names(tree))
    if name not in names and "*" not in names:
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        rule = f"names nothing in the file (no {name!r} in {path})"
        yield ValidationIssue(
            key=key, value=spec, message=rule, legal=", ".join(defined), hint=did_you_mean(name, defined)
        )


def _defined_names(tree: ast.AST) -> Iterator[str]:
    """Every name that the file may define, whatever decides it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


USER_MODULE_PREFIX = "echelon_user_"
"""what the names of users' files start with in `sys.modules`"""


def refuse_while_loading(verb: str) -> None:
    """A file that trains when it is read would train again in every rank, which reads it for its functions."""
    for frame in inspect.stack(context=0):
        name = frame.frame.f_globals.get("__name__", "")
        # The second is the name under which multiprocessing reads a program's file in a new process.
        if frame.function == "<module>" and (name.startswith(USER_MODULE_PREFIX) or name == "__mp_main__"):
            raise ValueError(
                f"{frame.filename} calls {verb} while a rank reads it to find the model; "
                'put the call under `if __name__ == "__main__":`'
            )


def load_factory(spec: str) -> Callable[..., Any]:
    """The function that `file.py:name` means."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ValueError(f"a model of your own is named file.py:factory ({spec!r}); add the name of the function")
    module = _load_module(Path(path))
    if not hasattr(module, name):
        raise ValueError(
            f"{path} has no function {name!r}; it has {', '.join(n for n in vars(module) if not n.startswith('_'))}"
        )
    found: Callable[..., Any] = getattr(module, name)
    return found


def _load_module(path: Path) -> ModuleType:
    key = USER_MODULE_PREFIX + path.resolve().stem
    if key in sys.modules and getattr(sys.modules[key], "__file__", None) == str(path.resolve()):
        return sys.modules[key]
    if not path.is_file():
        raise ValueError(f"there is no such file ({path}); give the path of a Python file")
    spec = importlib.util.spec_from_file_location(key, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]  # half of a module must not be taken for the module next time
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def factory_spec(function: Callable[..., Any]) -> str:
    """`file.py:name` of a function of the user's, so that ranks can find it."""
    path, name = inspect.getsourcefile(function), function.__qualname__
    if path is None or "<" in name or "." in name:
        raise ValueError(f"ranks must be able to import the function ({name}); define it at the top level of a file")
    return f"{path}:{name}"
