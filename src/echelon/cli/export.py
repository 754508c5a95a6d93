"""`echelon export`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli import conversion_progress
from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson, ShardSize, WeightDtype
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source

if TYPE_CHECKING:
    from echelon.training.run.export_model import TrainedModel

EXAMPLES = """[bold]Examples[/bold]\n
echelon export runs/llama-tiny-20250131-120000 out\n
echelon export runs/mine/checkpoints/step-00000100 out --average\n
echelon export runs/lora adapter\n
echelon export runs/lora merged --merge\n
echelon export llama-7b out --dtype bfloat16\n
echelon export mixtral out --shard-size 2GB --json\n
echelon export gpt2-124m first --seed 1
"""


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A run or one of its checkpoints, a directory that `echelon import` wrote, hf:DIR, or a named size "
            "with its initial weights."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write, which must be new or empty.")],
    dtype: WeightDtype = "keep",
    shard_size: ShardSize = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with LoRA adapters, export the full model with them merged.")
    ] = False,
    average: Annotated[bool, typer.Option("--average", help="Export the EMA of the weights (optimizer.ema).")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights of a named size.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Export a model as a Hugging Face model. Fails if transformers, where installed, computes other logits with it.

    Of a run with LoRA adapters, it exports the adapters in PEFT's format.
    """
    with report_errors(as_json):
        largest = conversion_progress.parse_file_size(shard_size)
        from echelon.checkpoint.hf.convert_model import export_model
        from echelon.training.run.export_model import is_run_or_checkpoint, load_trained_model

        if average and not is_run_or_checkpoint(source):
            raise ValueError(f"--average requires a run or a checkpoint (source {source})")
        trained = load_trained_model(source, ema=average) if is_run_or_checkpoint(source) else None
        has_adapters = trained is not None and trained.config.lora.rank > 0
        if merge and not has_adapters:
            raise ValueError(f"--merge requires a run with LoRA adapters (source {source})")
        if trained is not None and has_adapters and not merge:
            _export_adapters(trained, out, dtype, as_json)
            return
        name = trained.config.model if trained else source
        if is_hf_model(name):
            tensors: Mapping[str, Any] | None = trained.tensors if trained else None
            if trained is not None and merge:
                from echelon.training.run.export_lora import merged_tensors

                tensors = merged_tensors(trained)
            _export_foreign(name, tensors, out, dtype, seed, as_json)
            return
        model = trained.native if trained else source
        if trained is not None and merge:
            from echelon.training.run.export_lora import merged_native

            model = merged_native(trained)
        progress = conversion_progress.progress_bar
        done = export_model(model, out, dtype=dtype, max_shard_bytes=largest, seed=seed, progress=progress)
    conversion_progress.print_result(done, as_json)


def _export_adapters(trained: TrainedModel, out: Path, dtype: str, as_json: bool) -> None:
    from echelon.checkpoint.hf.convert_model import parse_dtype
    from echelon.training.run.export_lora import export_adapters

    done = export_adapters(trained, out, dtype=parse_dtype(dtype))
    if as_json:
        print_json(done.to_json())
    else:
        print(done)


def _export_foreign(
    model: str, tensors: Mapping[str, Any] | None, out: Path, dtype: str, seed: int, as_json: bool
) -> None:
    from echelon.checkpoint.hf.convert_model import parse_dtype
    from echelon.checkpoint.hf.foreign_export import export_foreign_model

    done = export_foreign_model(read_hf_source(model), tensors, out, dtype=parse_dtype(dtype), seed=seed)
    if as_json:
        print_json(done.to_json())
    else:
        print(done)
