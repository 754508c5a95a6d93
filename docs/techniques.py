"""Memory that each technique saves, by the planner: for tables.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.planning.planner import find_plans
from echelon.planning.search.memory_savings import SAVING_CATEGORIES, memory_savings
from echelon.planning.show.savings_table import format_change, format_fit, format_saved

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""head and rows"""


def saved() -> Table:
    """Of the plan that the page's command finds."""
    plan = find_plans("llama-8b", "1xh200", batch=4, seq_len=8192, top=1).plans[0]
    rows = [
        (
            f"`{one.technique}`",
            *(format_saved(one.saved[name]) for name in SAVING_CATEGORIES),
            format_saved(one.total),
            format_change(one.added_seconds / plan.seconds),
            format_fit(one),
        )
        for one in memory_savings(plan)
    ]
    return ("technique", *SAVING_CATEGORIES, "all", "step", "then"), rows
