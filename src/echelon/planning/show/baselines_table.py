"""Baselines beside the best plan, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.draw.number_format import format_bytes, format_duration
from echelon.planning.explain.baselines import Baseline
from echelon.planning.priced_plan import Plan


def baselines_report(best: Plan | None, baselines: Sequence[Baseline]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, border_style="dim")
    table.add_column("baseline", no_wrap=True)
    for name in ("devices", "step", "to the best", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for baseline in baselines:
        plan = baseline.plan
        fit = "" if plan.fits else ", does not fit"
        table.add_row(
            baseline.name,
            str(plan.layout.world),
            format_duration(plan.seconds),
            f"{plan.seconds / best.seconds:.1f}x" if best is not None else "",
            Text(format_bytes(plan.memory.total), style="" if plan.fits else "red"),
            Text(f"{baseline.reason or plan.layout}{fit}", style="dim"),
        )
    return Group(Text("What simpler ways would take", style="bold"), Text(), table)
