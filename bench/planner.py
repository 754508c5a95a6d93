"""How long planning takes, on one core: a full search, a price, and the start of the command.

python bench/planner.py            exits with 1 when a bar is missed
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from echelon.layout import Layout
from echelon.planning.cluster import cluster
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import PlanRequest
from echelon.planning.search.layout_search import search_plans

WISH = PlanRequest(
    shape=resolve_shape("llama-70b"), cluster=cluster.parse_cluster("1024xh100"), batch=1024, seq_len=8192
)
LAYOUTS = (
    Layout(dp=16, tp=8, pp=8, schedule="interleaved", vpp=5, accumulate=64),
    Layout(dp=32, tp=4, pp=8, schedule="zb-v", accumulate=32),
    Layout(dp=4, tp=8, pp=32, accumulate=256),
    Layout(dp=128, tp=8, zero=1, accumulate=8),
)


def seconds(work: Callable[[], object], *, times: int) -> float:
    """The shortest: what disturbs makes it longer, never shorter."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def help_text() -> None:
    subprocess.run([sys.executable, "-m", "echelon", "plan", "--help"], check=True, capture_output=True)


def main() -> int:
    slowest = max(seconds(lambda layout=layout: price(WISH.scenario(layout)), times=5) for layout in LAYOUTS)  # type: ignore[misc]
    rows = [
        ("70B on 1,024 H100: full search", seconds(lambda: search_plans(WISH), times=1), 10.0),
        (f"one layout priced, the slowest of {len(LAYOUTS)}", slowest, 0.05),
        ("the command starts", seconds(help_text, times=3), 1.0),
    ]
    table = Table("what", "seconds", "bar", "", box=None, padding=(0, 2, 0, 0))
    for name, found, bar in rows:
        table.add_row(name, f"{found:.3f}", f"{bar:g}", "[green]PASS" if found <= bar else "[red]MISS")
    Console().print(table)
    return 0 if all(found <= bar for _, found, bar in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
