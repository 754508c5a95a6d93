"""What several commands share: the declaration of their options, and the writing of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
WeightDtype = Annotated[str, typer.Option(help="Dtype of the weights: keep, float32, bfloat16, float16 or float64.")]
ShardSize = Annotated[str, typer.Option(help="Maximum size of a file.")]


def optional(help: str, *, metavar: str | None = None) -> Any:
    """Declare an option that may be left out; its help states what happens then."""
    return typer.Option(help=help, metavar=metavar, show_default=False)


def write_text(path: Path, text: str, what: str, other: str) -> None:
    """Write a file of a command; the error names `what` it is, and the `other` choice that the user has."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the {what} cannot be written ({path}: {error.strerror}); give another {other}") from error
