"""Where the time of a step goes, as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from echelon.bench.profile.breakdown import Breakdown

NAMELESS = 3
"""kernels of no known part that are named below the table"""


def heading(found: Breakdown) -> str:
    more = [f"recompute={found.recompute}"] if found.recompute != "none" else []
    more += [f"{found.states} states"] if found.states != "float32" else []
    words = ", ".join([f"{found.seq:,} x {found.batch} tokens", found.precision, *more, found.device])
    return f"[bold]{found.shape}[/bold], {words}: a step takes {found.step_s * 1e3:.1f} ms"


def table(found: Breakdown) -> Table:
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    made.add_column("part of a step", no_wrap=True)
    for name in ("measured", "share", "floor", "above the floor"):
        made.add_column(name, justify="right", no_wrap=True)
    for part in found.parts:
        made.add_row(part.name, *_cells(part.seconds, part.floor_s, found.total))
    made.add_section()
    made.add_row("together", *_cells(found.total, found.floor, found.total), style="bold")
    return made


def remarks(found: Breakdown) -> list[str]:
    unknown = [kernel for kernel in found.kernels if kernel.part == "other"][:NAMELESS]
    names = [f"  {kernel.seconds * 1e3:.2f} ms in {kernel.calls:g} x {kernel.name[:90]}" for kernel in unknown]
    return [
        f"The floor is products and attention alone, and the fewest bytes at {found.copy / 1e12:.2f} TB/s.",
        *(["The longest of the others:", *names] if names else []),
    ]


def _cells(seconds: float, floor: float, total: float) -> tuple[str, str, str, str]:
    return (
        f"{seconds * 1e3:.1f} ms",
        f"{seconds / total:.1%}" if total else "",
        f"{floor * 1e3:.1f} ms" if floor else "",
        f"{(seconds - floor) * 1e3:+.1f} ms",
    )
