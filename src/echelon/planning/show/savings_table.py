"""What each technique would save, as a table: GiB by category, and the seconds of a step that it adds."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.draw.number_format import format_bytes
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.priced_plan import Plan
from echelon.planning.search.memory_savings import SAVING_CATEGORIES, MemorySaving

SHORT = {"gradients": "grads", "activations": "acts"}
"""so that a line fits into 80 columns"""
MARKS = "*†‡"
NEGLIGIBLE = 0.05
"""GiB that are not worth a number"""


def savings_report(plan: Plan, savings: Sequence[MemorySaving]) -> RenderableType:
    shown = [name for name in SAVING_CATEGORIES if any(abs(one.saved[name]) >= NEGLIGIBLE * GIB for one in savings)]
    marks = dict(zip(dict.fromkeys(one.training_effect for one in savings if one.training_effect), MARKS, strict=False))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, border_style="dim")
    table.add_column("technique", no_wrap=True)
    for name in (*shown, "all", "step"):
        table.add_column(SHORT.get(name, name), justify="right", no_wrap=True)
    table.add_column("then", no_wrap=True)
    for one in savings:
        share = one.added_seconds / plan.seconds
        table.add_row(
            one.technique + marks.get(one.training_effect, ""),
            *(format_saved(one.saved[name]) for name in shown),
            Text(format_saved(one.total), style="bold green" if one.total > NEGLIGIBLE * GIB else "dim"),
            Text(format_change(share), style="red" if share > 0.005 else "green" if share < -0.005 else "dim"),
            Text(format_fit(one), style="" if one.plan.fits else "dim"),
        )
    head = f"What each technique would save of {format_bytes(plan.memory.total)} ({plan.layout}), in GiB"
    below = "; ".join(f"{mark} {effect}" for effect, mark in marks.items())
    return Group(Text(head, style="bold"), Text(), table, Text(below, style="dim"))


def format_saved(size: float) -> str:
    return "·" if abs(size) < NEGLIGIBLE * GIB else f"{size / GIB:.1f}"


def format_change(share: float) -> str:
    return "same" if abs(share) < 0.005 else f"{share:+.0%}"


def format_fit(one: MemorySaving) -> str:
    over = one.plan.memory.total - one.plan.scenario.cluster.memory
    fit = "fits" if one.plan.fits else f"{format_bytes(over)} too much"
    return fit if one.plan.runnable else f"{fit}, plan only"
