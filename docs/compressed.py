"""What bench/compress.py measured of compression: for tables.py and for the pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "pictures"


def runs() -> list[dict[str, Any]]:
    """Every run that lies here as a file `compression-*.json`."""
    paths = sorted(FOLDER.glob("compression-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def title(run: dict[str, Any]) -> str:
    asked = run["asked"]
    return f"{asked['model']}, batch {asked['batch']}, {asked['dtype']}, {run['on']}"


def measured() -> tuple[Sequence[str], Iterator[Sequence[str]]]:
    head = ("model", "`compress`", "MiB stored", "smaller", "error of the gradient", "time of a step", "peak MiB")
    return head[: _columns()], _rows()


def _columns() -> int:
    """Without the last two where no step was timed."""
    return 7 if any("ratio" in row for run in runs() for row in run["rows"]) else 5


def _rows() -> Iterator[Sequence[str]]:
    for run in runs():
        for row in run["rows"]:
            first = row["compress"] == "none"
            changed = "" if first else "0, bit by bit" if row["equal"] else f"{100 * row['error']:.2g} %"
            time = f"{row['ratio']:.2f} x" if "ratio" in row else ""
            peak = f"{row['peak_bytes'] / 2**20:,.0f}" if row["peak_bytes"] else ""
            smaller = f"{run['rows'][0]['bytes'] / row['bytes']:.2f} x"
            kept = f"{row['bytes'] / 2**20:.1f}"
            yield (title(run), row["compress"], kept, smaller, changed, time, peak)[: _columns()]
