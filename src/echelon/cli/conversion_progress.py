"""The output of `import` and `export`: a progress bar, and a summary of what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from echelon.cli.cli_errors import print_json
from echelon.layout.validation_error import ValidationError, ValidationIssue

if TYPE_CHECKING:
    from echelon.checkpoint.hf.convert_model import ConversionResult

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_file_size(text: str) -> int:
    """Parse a file size as Hugging Face writes it: 5GB, 500MB, ..."""
    number, unit = text.strip()[:-2].strip(), text.strip()[-2:].upper()
    try:
        num_bytes = int(float(number) * SIZE_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        rule, legal = "is not a valid file size", "a number and KB, MB, GB or TB: 5GB"
        raise ValidationError([ValidationIssue("shard-size", text, rule, legal=legal)])
    return num_bytes


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda some: bar.advance(task, some)


def print_result(done: ConversionResult, as_json: bool) -> None:
    if as_json:
        print_json(done.to_json())
        return
    files = sum(name.endswith(".safetensors") for name in done.files)
    config = done.model.config
    print(
        f"wrote {done.directory}: {done.model.model_type or config.family}, {config.parameters:,} parameters, "
        f"{done.tensors} tensors of {done.dtype}, {done.num_bytes:,} bytes in {files} file{'s' if files > 1 else ''}"
    )
    if done.check is None:
        return
    against = {"transformers": "transformers' own model", "import": "Echelon's import (transformers is not installed)"}
    print(f"logits equal those of {against[done.check.against]}")
