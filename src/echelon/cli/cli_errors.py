"""Error handling of commands: messages on standard error, no traceback for invalid input, exit status != 0."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from echelon.input_file import os_reason
from echelon.launch.rank_failure import RankError, traceback_modules, user_error_messages
from echelon.launch.world import JoinError
from echelon.models.user_model import USER_MODULE_PREFIX, is_refusal

EXIT_BAD_INPUT, EXIT_FAILED = 2, 1
MAX_LINE = 2000


@contextmanager
def report_errors(as_json: bool) -> Iterator[None]:
    """Print the errors of the block and exit: with status 2 for invalid input, 1 for a failed rank."""
    try:
        yield
    except ValueError as error:
        if not is_refusal(traceback_modules(error)):
            raise
        _print_errors(as_json, user_error_messages(error))
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except JoinError as error:
        _print_errors(as_json, [f"echelon: {error}"])
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        if error.filename is None or any(name.startswith(USER_MODULE_PREFIX) for name in traceback_modules(error)):
            raise
        reason = f"{os.fsdecode(error.filename)}: {os_reason(error)}"
        _print_errors(as_json, [f"the operating system refused a file ({reason}); check its path and permissions"])
        raise typer.Exit(EXIT_FAILED) from None
    except RankError as error:
        failure = error.failure
        if failure is not None and failure.user_errors and is_refusal(failure.modules):
            _print_errors(as_json, failure.user_errors)
            raise typer.Exit(EXIT_BAD_INPUT) from None
        _print_errors(as_json, [f"echelon: {error}"])
        raise typer.Exit(EXIT_FAILED) from None


def _print_errors(as_json: bool, errors: Sequence[str]) -> None:
    errors = ["\n".join(map(_shorten, error.splitlines())) for error in errors]
    print("\n".join(errors), file=sys.stderr)
    if as_json:
        print_json({"errors": errors})


def _shorten(line: str) -> str:
    """The start of a line: a value of a broken file may have any length."""
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…"


def print_json(value: Any) -> None:
    """Print the object of `--json`, with null for numbers that JSON lacks (no MFU, an infinite error)."""
    print(json.dumps(_replace_non_finite(value), allow_nan=False))


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value
