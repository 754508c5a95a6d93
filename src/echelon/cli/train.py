"""`echelon train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson

if TYPE_CHECKING:
    from echelon.config.run_config import Config

EXAMPLES = """[bold]Examples[/bold]\n
echelon train --procs 2\n
echelon train --set model=llama-tiny --set layout=dp=2,tp=2 --set steps=100\n
echelon train config.toml --set optimizer.lr=1e-3 --json\n
echelon train --plan auto\n
echelon train --procs 2 --set timeout=20 --inject sleep:rank=1,step=7\n
echelon train --resume runs/llama-tiny-20250131-120000 --set layout=dp=2\n
echelon train --procs 4 --set checkpoint.every=50 --set elastic.restarts=3 --set elastic.replan=true\n
torchrun --nproc-per-node 2 -m echelon train config.toml
"""


def command(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file. Default: a small model on text of this machine.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration key; may be repeated.")
    ] = None,
    procs: Annotated[
        int | None, typer.Option(help="Ranks to start. Default: as many as the layout needs, or one per GPU.")
    ] = None,
    plan: Annotated[
        str,
        typer.Option(
            metavar="auto|FILE", help="Let the planner choose the layout, or use that of a plan (plan --json)."
        ),
    ] = "",
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT",
            help="Inject a fault, e.g. kill:rank=1,step=7; may be repeated. Also raise, "
            "sleep, gone, skip-collective, slow-rank, corrupt-file, full-disk, spike, flip.",
        ),
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="RUN", help="Resume a run from its newest checkpoint, or from the given one.")
    ] = "",
    keys: Annotated[bool, typer.Option("--keys", help="List every configuration key and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model."""
    if keys:
        _list_keys(as_json)
        return
    with report_errors(as_json):
        from echelon.training.run.resume import resumed_config
        from echelon.training.start_training import load_config, run_training

        if resume and config is not None:
            raise ValueError(f"--resume uses the saved configuration (got {config}); change keys with --set")
        given = settings or []
        run_config = resumed_config(resume, given, world=procs) if resume else load_config(config, given, procs)
        if plan:
            run_config = _apply_plan(run_config, plan, procs, quiet=as_json)
        summary = run_training(run_config, procs=procs, quiet=as_json, inject=inject or [], resume=resume)
    if as_json and summary.run:
        print_json(summary.log_fields())
    if summary.stopped is not None:
        from echelon.faults.graceful_stop import EXIT_STATUS

        raise typer.Exit(EXIT_STATUS)


def _apply_plan(config: Config, plan: str, procs: int | None, *, quiet: bool) -> Config:
    """The configuration with the layout that the planner chose."""
    from echelon.launch.world import under_launcher
    from echelon.training.run.auto_layout import with_planned_layout

    chosen, words = with_planned_layout(config, plan, procs)
    if not quiet and not under_launcher():
        typer.echo(words, err=True)
    return chosen


def _list_keys(as_json: bool) -> None:
    from echelon.config.run_config import Config

    rows = Config.keys()
    if as_json:
        print_json({k.name: {"type": str(k.type), "default": str(k.default), "meaning": k.meaning} for k in rows})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("key", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=16)
    table.add_column("meaning")
    for key in rows:
        table.add_row(f"[cyan]{key.name}[/cyan]", str(key.default), key.meaning)
    Console().print(table)
