"""What a command does with an error: all of it on standard error, no traceback for what a user can cause, exit != 0."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from echelon.launch.rank_failure import RankError, modules_of, refusals
from echelon.models.user_model import USERS

BAD_INPUT, FAILED = 2, 1


@contextmanager
def told(as_json: bool) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if not _is_refusal(modules_of(error)):
            raise
        _tell(as_json, refusals(error))
        raise typer.Exit(BAD_INPUT) from None
    except RankError as error:
        failure = error.failure
        if failure is not None and failure.refused and _is_refusal(failure.modules):
            _tell(as_json, failure.refused)
            raise typer.Exit(BAD_INPUT) from None
        _tell(as_json, [f"echelon: {error}"])
        raise typer.Exit(FAILED) from None


def _tell(as_json: bool, errors: Sequence[str]) -> None:
    print("\n".join(errors), file=sys.stderr)
    if as_json:
        answer({"errors": errors})


def _is_refusal(modules: Sequence[str]) -> bool:
    """Whether our own code said no to what a user gave.

    Out of a user's own file, the line that raised it is what the user needs; out of a library, it is what we need.
    """
    ours = bool(modules) and modules[-1].partition(".")[0] == "echelon"
    return ours and not any(name.startswith(USERS) for name in modules)


def answer(value: Any) -> None:
    """The one object of `--json`. A number that JSON lacks (no MFU, an infinite error) is null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
