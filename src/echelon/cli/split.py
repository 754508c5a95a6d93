"""`echelon split`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson

if TYPE_CHECKING:
    from echelon.planning.model.solved_split import DerivedRegions, SplitTable

EXAMPLES = """[bold]Examples[/bold]\n
echelon split model.py:build --tp 4\n
echelon split model.py:build --tp 4 --override "blocks.*.up.weight = S0" --override "blocks.*.gelu = R"\n
echelon split hf:my-model --tp 2
"""


def command(
    model: Annotated[str, typer.Argument(help="file.py:factory of a custom model, or hf:DIR.")],
    tp: Annotated[int, typer.Option(min=2, help="Ranks that share the model.")] = 2,
    sp: Annotated[
        bool, typer.Option(help="Also shard what lies between layers; --no-sp keeps it whole, as sp=0 does.")
    ] = True,
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="'PATTERN = STATE'", help="Fix the state of operators or parameters: R, B, P, S0, S1/3."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every operator, views and slices too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how tp ranks share a model that has no table of splits: operator by operator, with what it costs."""
    with report_errors(as_json):
        from echelon.layout.validation_error import ValidationError
        from echelon.models.foreign.hf_source import is_hf_model
        from echelon.models.user_model import is_user_model
        from echelon.planning.model import solved_split

        overrides = override or []
        regions: DerivedRegions | None = None
        table: SplitTable | None = None
        if is_hf_model(model) and not overrides:
            regions = solved_split.find_regions(model, tp)
        elif is_user_model(model):
            table = solved_split.solve_split(model, tp, sp=sp, overrides=overrides)
        else:
            rule = "takes no overrides" if overrides else "has a table of splits, or is unknown"
            raise ValidationError.single("model", model, rule, legal="file.py:factory of a custom model, or hf:DIR")
    if regions is not None:
        print_json(_regions_json(regions)) if as_json else _show_regions(regions, tp)
    elif table is not None:
        rows = solved_split.shown_rows(table, every=every or as_json)
        print_json(_table_json(table, rows)) if as_json else _show_table(table, rows)


def _table_json(table: SplitTable, rows: Any) -> dict[str, Any]:
    cost = table.solution.cost
    return {
        "ranks": table.ranks,
        "step_s": cost.total,
        "time": {"compute": cost.compute, "traffic": cost.traffic, "collectives": cost.collectives},
        "memory_bytes": table.solution.memory_bytes,
        "optimal": table.solution.optimal,
        "note": table.solution.note,
        "whole_s": table.whole_seconds,
        "rows": [
            {
                "name": row.name,
                "op": row.op,
                "layers": row.layers,
                "inputs": list(row.inputs),
                "parameters": list(row.params),
                "output": row.output,
                "share": row.share,
                "seconds": row.seconds,
                "collectives": [
                    {"op": each.op, "bytes": each.bytes, "count": each.count, "purpose": each.purpose}
                    for each in row.collectives
                ],
            }
            for row in rows
        ],
    }


def _show_table(table: SplitTable, rows: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"on each of {table.ranks} ranks", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("operator", "layers", "reads", "parameters", "gives"):
        shown.add_column(heading, justify="right" if heading == "layers" else "left", overflow="fold")
    shown.add_column("share", justify="right")
    shown.add_column("collectives of a step", overflow="fold")
    for row in rows:
        collectives = ", ".join(f"{each.count} x {each.op.replace('_', '-')}" for each in row.collectives)
        own = row.name.rpartition(".")[2]
        params = "\n".join(param.replace(f"{row.name}.", "") for param in row.params)
        label = row.name if row.op == own or row.params else f"{row.name} ({row.op})"
        states = (", ".join(row.inputs), params, row.output, f"{row.share:.3g}", collectives)
        shown.add_row(label, str(row.layers), *states, style="yellow" if row.is_whole else "")
    console = Console()
    console.print(shown)
    console.print("R whole, B whole with partial gradients, P partial sum, S1 slice of dimension 1", style="dim")
    for line in table.summary():
        console.print(line, highlight=False)


def _regions_json(regions: DerivedRegions) -> dict[str, Any]:
    return {
        "regions": [
            {"module": r.module, "columns": list(r.columns), "row": r.row, "layers": r.layers} for r in regions.regions
        ],
        "whole": list(regions.whole),
        "experts": list(regions.experts),
    }


def _show_regions(regions: DerivedRegions, tp: int) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"regions that {tp} ranks share", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("module", "layers", "by columns", "by rows"):
        shown.add_column(heading, justify="right" if heading == "layers" else "left")
    for region in regions.regions:
        shown.add_row(region.module, str(region.layers), ", ".join(region.columns), region.row)
    console = Console()
    console.print(shown)
    console.print("the embedding and the head are sharded over the vocabulary", style="dim")
    if regions.experts:
        console.print(f"ep divides the experts of {', '.join(regions.experts)}; tp leaves them whole")
    if regions.whole:
        console.print(f"stays whole, on every rank: {', '.join(regions.whole)}", style="yellow")
