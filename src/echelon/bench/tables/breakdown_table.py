"""The breakdown of a step as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from echelon.bench.profile.breakdown import Breakdown

MAX_UNKNOWN = 3
"""unclassified kernels that are named below the table"""


def heading(breakdown: Breakdown) -> str:
    more = [f"recompute={breakdown.recompute}"] if breakdown.recompute != "none" else []
    more += [f"{breakdown.states} states"] if breakdown.states != "float32" else []
    tokens = f"{breakdown.seq:,} x {breakdown.batch} tokens"
    settings = ", ".join([tokens, breakdown.precision, *more, breakdown.device])
    return f"[bold]{breakdown.shape}[/bold], {settings}: a step takes {breakdown.step_s * 1e3:.1f} ms"


def breakdown_table(breakdown: Breakdown) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("part of a step", no_wrap=True)
    for name in ("measured", "share", "floor", "above the floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in breakdown.parts:
        table.add_row(part.name, *_cells(part.seconds, part.floor_s, breakdown.total))
    table.add_section()
    table.add_row("together", *_cells(breakdown.total, breakdown.floor, breakdown.total), style="bold")
    return table


def remarks(breakdown: Breakdown) -> list[str]:
    unknown = [kernel for kernel in breakdown.kernels if kernel.part == "other"][:MAX_UNKNOWN]
    names = [f"  {kernel.seconds * 1e3:.2f} ms in {kernel.calls:g} x {kernel.name[:90]}" for kernel in unknown]
    return [
        f"The floor is matmuls and attention alone, and the minimum bytes at {breakdown.copy / 1e12:.2f} TB/s.",
        *(["The longest unclassified kernels:", *names] if names else []),
    ]


def _cells(seconds: float, floor: float, total: float) -> tuple[str, str, str, str]:
    return (
        f"{seconds * 1e3:.1f} ms",
        f"{seconds / total:.1%}" if total else "",
        f"{floor * 1e3:.1f} ms" if floor else "",
        f"{(seconds - floor) * 1e3:+.1f} ms",
    )
