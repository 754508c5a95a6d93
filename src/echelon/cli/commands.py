"""All commands: a new one is one module in this package and one line here."""

# Imported by `main` when it runs: typer and the modules of the commands take half a second.

from __future__ import annotations

import typer

from echelon.cli import bench, draw, export, import_, plan, score, split, train, verify

app = typer.Typer(
    name="echelon",
    help="Train a one-device PyTorch model on many devices, and prove that the split changes nothing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train", epilog=train.EXAMPLES)(train.command)
app.command("verify", epilog=verify.EXAMPLES)(verify.command)
app.command("plan", epilog=plan.EXAMPLES)(plan.command)
app.command("split", epilog=split.EXAMPLES)(split.command)
app.command("score", epilog=score.EXAMPLES)(score.command)
app.command("draw", epilog=draw.EXAMPLES)(draw.command)
app.command("bench", epilog=bench.EXAMPLES)(bench.command)
app.command("import", epilog=import_.EXAMPLES)(import_.command)
app.command("export", epilog=export.EXAMPLES)(export.command)
