"""What a command does with an error: all of it on standard error, no traceback for what a user can cause, exit != 0."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from echelon.launch.failure import RankError
from echelon.layout.faults import FaultError
from echelon.models.own import USERS

BAD_INPUT, FAILED = 2, 1


@contextmanager
def told(as_json: bool) -> Iterator[None]:
    try:
        yield
    except FaultError as error:
        _tell(as_json, str(error), [str(fault) for fault in error.faults])
        raise typer.Exit(BAD_INPUT) from None
    except ValueError as error:
        if _is_users(error):
            raise
        _tell(as_json, f"echelon: {error}", [str(error)])
        raise typer.Exit(BAD_INPUT) from None
    except RankError as error:
        _tell(as_json, f"echelon: {error}", [str(error)])
        raise typer.Exit(FAILED) from None


def _tell(as_json: bool, text: str, errors: list[str]) -> None:
    print(text, file=sys.stderr)
    if as_json:
        answer({"errors": errors})


def _is_users(error: BaseException) -> bool:
    """Whether it came out of a user's own file: there, the line that raised it is what the user needs."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(USERS) for frame, _ in frames)


def answer(value: Any) -> None:
    """The one object of `--json`. A number that JSON lacks (no MFU, an infinite error) is null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
