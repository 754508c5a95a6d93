"""The rows of a benchmark as a table for the terminal, and the remarks below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from echelon.bench.bench_rows import BenchRow
from echelon.training.logging.metrics import PeakFlops

TEXT_COLUMNS = ("shape", "tokens", "type", "who")
NUMBER_COLUMNS = ("step", "tokens/s", "MFU", "HFU", "GiB", "first", "ratio")
RECOMPUTE_MARK = " *"
"""marks rows with activation checkpointing"""
WIDE_TERMINAL = 96
"""columns of a terminal wide enough for wider gaps"""


def step_table(rows: Sequence[BenchRow], *, width: int) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2 if width >= WIDE_TERMINAL else 1, 0, 0), pad_edge=False)
    for name in (*TEXT_COLUMNS, *NUMBER_COLUMNS):
        table.add_column(name, justify="right" if name in NUMBER_COLUMNS else "left", no_wrap=True)
    last = ""
    for row in rows:
        if last and row.shape != last:
            table.add_section()
        last = row.shape
        table.add_row(*_cells(row), style="bold" if row.is_ours else "")
    return table


def _cells(row: BenchRow) -> list[str]:
    who = row.who + (RECOMPUTE_MARK if row.recompute != "none" else "")
    first = [row.shape, f"{row.seq}x{row.batch}", row.precision, who]
    if row.step_s is None or row.tokens_per_s is None:
        return [*first, "[red]failed[/red]", *[""] * (len(NUMBER_COLUMNS) - 1)]
    return [
        *first,
        f"{row.step_s * 1e3:.1f} ms",
        f"{row.tokens_per_s:,.0f}",
        f"{row.mfu:.1%}",
        f"{row.hfu:.1%}",
        f"{(row.peak_bytes or 0) / 2**30:.1f}",
        f"{row.first_step_s:.1f} s",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
    ]


def remarks(rows: Sequence[BenchRow], left_out: Mapping[str, str], peak: PeakFlops) -> list[str]:
    """Lines below the table: what columns mean, failures, skipped peers and shapes, versions."""
    fp8_too = ", in fp8 too" if any(row.precision.startswith("fp8") for row in rows) else ""
    lines = [f"MFU, HFU: shares of {peak.flops / 1e12:.4g} TFLOP/s ({peak.source}){fp8_too}"]
    lines.append("first: from the start of the process to the end of its first step")
    if best := sorted({row.peer for row in rows if row.peer}):
        lines.append(f"ratio: our tokens per second over the fastest peer's ({', '.join(best)})")
    recomputed = {(f"recompute={row.recompute}", row.who) for row in rows if row.recompute != "none"}
    if recomputed:
        lines.append(f"{RECOMPUTE_MARK.strip()}: {', '.join(f'{who} with {word}' for word, who in sorted(recomputed))}")
    for word in sorted({row.states for row in rows} - {"float32"}):
        lines.append(f"echelon's optimizer states are in {word}")
    lines += [f"failed: {row.shape}, {row.precision}, {row.who}: {row.failed}" for row in rows if row.failed]
    lines += [f"left out: {name}, {why}" for name, why in left_out.items()]
    versions = sorted({version for row in rows for version in row.versions})
    return [*lines, ", ".join(versions)] if versions else lines
