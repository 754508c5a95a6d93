"""Where the time of a step goes, as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from echelon.bench.profile.breakdown import Breakdown

MAX_UNKNOWN = 3
"""kernels of no known part that are named below the table"""


def heading(breakdown: Breakdown) -> str:
    more = [f"recompute={breakdown.recompute}"] if breakdown.recompute != "none" else []
    more += [f"{breakdown.states} states"] if breakdown.states != "float32" else []
    words = ", ".join([f"{breakdown.seq:,} x {breakdown.batch} tokens", breakdown.precision, *more, breakdown.device])
    return f"[bold]{breakdown.shape}[/bold], {words}: a step takes {breakdown.step_s * 1e3:.1f} ms"


def breakdown_table(breakdown: Breakdown) -> Table:
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column("part of a step", no_wrap=True)
    for name in ("measured", "share", "floor", "above the floor"):
        made.add_column(name, justify="right", no_wrap=True)
    for part in breakdown.parts:
        made.add_row(part.name, *_cells(part.seconds, part.floor_s, breakdown.total))
    made.add_section()
    made.add_row("together", *_cells(breakdown.total, breakdown.floor, breakdown.total), style="bold")
    return made


def remarks(breakdown: Breakdown) -> list[str]:
    unknown = [kernel for kernel in breakdown.kernels if kernel.part == "other"][:MAX_UNKNOWN]
    names = [f"  {kernel.seconds * 1e3:.2f} ms in {kernel.calls:g} x {kernel.name[:90]}" for kernel in unknown]
    return [
        f"The floor is products and attention alone, and the fewest bytes at {breakdown.copy / 1e12:.2f} TB/s.",
        *(["The longest of the others:", *names] if names else []),
    ]


def _cells(seconds: float, floor: float, total: float) -> tuple[str, str, str, str]:
    return (
        f"{seconds * 1e3:.1f} ms",
        f"{seconds / total:.1%}" if total else "",
        f"{floor * 1e3:.1f} ms" if floor else "",
        f"{(seconds - floor) * 1e3:+.1f} ms",
    )
