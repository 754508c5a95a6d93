"""What a command does with an error: all of it on standard error, no traceback for what a user can cause, exit != 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from echelon.layout.faults import FaultError

BAD_INPUT, FAILED = 2, 1


@contextmanager
def told(as_json: bool) -> Iterator[None]:
    try:
        yield
    except FaultError as error:
        _tell(as_json, str(error), [str(fault) for fault in error.faults])
        raise typer.Exit(BAD_INPUT) from None
    except ValueError as error:
        _tell(as_json, f"echelon: {error}", [str(error)])
        raise typer.Exit(BAD_INPUT) from None
    except RuntimeError as error:
        if type(error).__name__ != "RankError":  # told by name: importing it would import torch's launcher
            raise
        _tell(as_json, f"echelon: {error}", [str(error)])
        raise typer.Exit(FAILED) from None


def _tell(as_json: bool, text: str, errors: list[str]) -> None:
    print(text, file=sys.stderr)
    if as_json:
        print(json.dumps({"errors": errors}))
