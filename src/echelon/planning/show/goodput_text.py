"""The cost of failures as text: checkpoint interval, recovery time, goodput."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.draw.number_format import format_duration as duration
from echelon.planning.explain.failure_cost import PredictedGoodput
from echelon.planning.priced_plan import Plan


def goodput_report(plan: Plan, goodput: PredictedGoodput) -> RenderableType:
    recovery, spent = goodput.recovery, goodput.shares
    head = f"What failures cost {plan.layout}: one every {duration(goodput.mtbf)} on {plan.scenario.cluster.name}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, border_style="dim")
    table.add_column("of the time", justify="right", no_wrap=True)
    table.add_column("goes into")
    useful = Text(f"{spent.useful:.1%}", style="bold green")
    table.add_row(useful, f"training ({goodput.low:.1%} to {goodput.high:.1%})")
    table.add_row(
        f"{spent.down:.2%}",
        f"failures: {duration(recovery.detect)} to detect one, {duration(recovery.replace)} to replace a node, "
        f"{duration(recovery.restart)} to restart",
    )
    table.add_row(
        f"{spent.lost:.2%}",
        f"lost work: a checkpoint every {duration(goodput.checkpoint_seconds)}, "
        f"committed {duration(recovery.exists)} later",
    )
    table.add_row(f"{spent.saving:.2%}", f"waiting for saves: {duration(recovery.save)} each")
    setting = f"--set checkpoint.every={goodput.checkpoint_steps} --set timeout={recovery.detect:.0f}"
    return Group(Text(head, style="bold"), Text(), table, Text(), Text(f"train with {setting}"))
