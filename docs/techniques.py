"""What the planner says that each technique would save: for tables.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.planning.planner import answer
from echelon.planning.search.memory_savings import CATEGORIES, savings
from echelon.planning.show.savings_table import gib, percent, then

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""head and rows"""


def saved() -> Table:
    """Of the plan that the page's command finds."""
    plan = answer("llama-8b", "1xh200", batch=4, seq_len=8192, top=1).plans[0]
    rows = [
        (
            f"`{one.technique}`",
            *(gib(one.saved[name]) for name in CATEGORIES),
            gib(one.total),
            percent(one.seconds / plan.seconds),
            then(one),
        )
        for one in savings(plan)
    ]
    return ("technique", *CATEGORIES, "all", "step", "then"), rows
