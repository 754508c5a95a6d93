"""`echelon score`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson

if TYPE_CHECKING:
    from echelon.planning.calibrate.scoring import Score

EXAMPLES = """[bold]Examples[/bold]\n
echelon score measurements.csv\n
echelon score measurements.csv --json
"""


def command(
    table: Annotated[Path, typer.Argument(help="A CSV of measured runs; docs/planning.md lists its columns.")],
    as_json: AsJson = False,
) -> None:
    """Predict every run of a table and compare with the measurements."""
    with report_errors(as_json):
        from echelon.planning.calibrate import published_runs
        from echelon.planning.calibrate.scoring import score_runs

        questions, skipped = published_runs.parse_runs(published_runs.read_runs(table))
        if not questions:
            raise ValueError(f"no run of the table can be predicted ({table}); docs/planning.md lists its columns")
        result = score_runs(questions, skipped)
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)


def _show(result: Score) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="predicted against measured", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("source", no_wrap=True)
    for heading in ("runs", "time, median", "time, p90", "fits", "fit or not", "regret"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in result.sources.items():
        shares = (one.time_median, one.time_p90, one.fits, one.fit_accuracy, one.regret)
        table.add_row(name, str(one.rows), *("" if share is None else f"{share:.1%}" for share in shares))
    shares = (result.time_median, result.time_p90, None, result.fit_accuracy, result.regret)
    table.add_section()
    table.add_row("mean over sources", "", *("" if share is None else f"{share:.1%}" for share in shares), style="bold")
    console = Console()
    console.print(table)
    console.print(
        f"{result.coverage:.0%} of the runs lie inside the 80 % interval, half of which is {result.half_width:.0%} wide"
    )
    console.print(f"{result.fits:.0%} of the runs that ran are predicted to fit into memory")
    for reason, count in result.skipped.items():
        console.print(f"{count} rows skipped: {reason}", style="dim")
