"""`echelon export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli import conversion_progress
from echelon.cli.cli_errors import print_json, report_errors

EXAMPLES = """[bold]Examples[/bold]\n
echelon export runs/llama-tiny-20250131-120000 out\n
echelon export runs/mine/checkpoints/step-00000100 out --average\n
echelon export llama-7b out --dtype bfloat16\n
echelon export mixtral out --shard-size 2GB --json\n
echelon export gpt2-124m first --seed 1
"""


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A run or one of its checkpoints, a directory that `echelon import` made, or a named size with its "
            "first values."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write, which must be new or empty.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: keep, float32, bfloat16, float16 or float64.")] = "keep",
    shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    average: Annotated[
        bool, typer.Option("--average", help="The moving average of a run's weights (optimizer.ema).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the first values of a named size.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Write a model of ours as a Hugging Face model. Refused unless transformers computes the same logits with it."""
    with report_errors(as_json):
        largest = conversion_progress.parse_file_size(shard_size)
        from echelon.checkpoint.hf.convert_model import export_model
        from echelon.training.run.export_model import is_run_or_checkpoint, load_trained_model

        if average and not is_run_or_checkpoint(source):
            raise ValueError(f"only a run has an average of its weights (--average, source {source})")
        given = load_trained_model(source, ema=average) if is_run_or_checkpoint(source) else source
        done = export_model(
            given, out, dtype=dtype, max_shard_bytes=largest, seed=seed, progress=conversion_progress.progress_bar
        )
    if as_json:
        print_json(done.to_json())
    else:
        conversion_progress.print_result(done)
