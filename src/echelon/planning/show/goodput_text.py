"""What failures cost a plan, in a few lines: how often to save, what a failure takes, what is left for training."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.planning.explain.failure_cost import DAY, HOUR, PredictedGoodput
from echelon.planning.priced_plan import Plan


def goodput_report(plan: Plan, found: PredictedGoodput) -> RenderableType:
    recovery, spent = found.recovery, found.shares
    head = f"What failures cost {plan.layout}: one every {format_duration(found.mtbf)} on {plan.scenario.cluster.name}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, border_style="dim")
    table.add_column("of the time", justify="right", no_wrap=True)
    table.add_column("goes into")
    table.add_row(Text(f"{spent.useful:.1%}", style="bold green"), f"training ({found.low:.1%} to {found.high:.1%})")
    table.add_row(
        f"{spent.down:.2%}",
        f"failures: {format_duration(recovery.detect)} until one is known, {format_duration(recovery.replace)} for another machine, "
        f"{format_duration(recovery.restart)} to start",
    )
    table.add_row(
        f"{spent.lost:.2%}",
        f"work done again: a checkpoint every {format_duration(found.checkpoint_seconds)}, there {format_duration(recovery.exists)} later",
    )
    table.add_row(f"{spent.saving:.2%}", f"waiting for saves: {format_duration(recovery.save)} each")
    setting = f"--set checkpoint.every={found.checkpoint_steps} --set timeout={found.timeout:.0f}"
    return Group(Text(head, style="bold"), Text(), table, Text(), Text(f"train with {setting}"))


def format_duration(seconds: float) -> str:
    for size, name in ((DAY, "days"), (HOUR, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
