"""`echelon export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli import carrying
from echelon.cli.trouble import answer, told

EXAMPLES = """[bold]Examples[/bold]\n
echelon export runs/llama-tiny-20250131-120000 out --dtype bfloat16\n
echelon export runs/llama-tiny-20250131-120000/checkpoints/step-00000100 out\n
echelon export mixtral out --shard-size 2GB --json\n
echelon export gpt2-124m first --seed 1
"""


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A run, whose newest checkpoint is taken, or one of its checkpoints; a directory that `echelon "
            "import` made; or a named size with its first values."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write, which must be new or empty.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: keep, float32, bfloat16, float16 or float64.")] = "keep",
    shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    seed: Annotated[int, typer.Option(help="Of the first values of a named size.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Write a model of ours as a Hugging Face model. Refused unless transformers computes the same logits with it."""
    with told(as_json):
        largest = carrying.size(shard_size)
        from echelon.checkpoint.hugging_face.carry import export_model
        from echelon.train.learnt import is_run, learnt

        given = learnt(source) if is_run(source) else None
        done = export_model(
            source, out, dtype=dtype, largest=largest, seed=seed, given=given, progress=carrying.progress
        )
    if as_json:
        answer(done.facts())
    else:
        carrying.show(done)
