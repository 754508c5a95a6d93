"""`echelon import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli import conversion_progress
from echelon.cli.cli_errors import report_errors
from echelon.cli.cli_options import AsJson, ShardSize, WeightDtype

EXAMPLES = """[bold]Examples[/bold]\n
echelon import Llama-2-7b-hf llama-7b\n
echelon import Mixtral-8x7B-v0.1 mixtral --dtype bfloat16 --check\n
echelon train --set model=llama-7b
"""


def command(
    source: Annotated[Path, typer.Argument(help="A directory with config.json and safetensors files.")],
    out: Annotated[Path, typer.Argument(help="The directory to write, which must be new or empty.")],
    dtype: WeightDtype = "keep",
    shard_size: ShardSize = "5GB",
    check: Annotated[
        bool, typer.Option("--check", help="Compare logits with those of transformers' own model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import a Hugging Face model. No pickle is opened, and no code of the model is run."""
    with report_errors(as_json):
        largest = conversion_progress.parse_file_size(shard_size)
        from echelon.checkpoint.hf.convert_model import import_model

        progress = conversion_progress.progress_bar
        done = import_model(source, out, dtype=dtype, max_shard_bytes=largest, with_check=check, progress=progress)
    conversion_progress.print_result(done, as_json)
