"""What bench/memory.py measured of every way to save memory: for tables.py and for the pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
HELD = ("parameters", "master", "moments", "gradients")
REST = "activations and the rest"
"""what is left of the fullest moment: kept for backward, logits, what an operator works with"""


def run(name: str) -> dict[str, Any]:
    """`stack` (one on top of the other) or `alone`: with the model and the device they were measured on."""
    path = Path(__file__).parent / "pictures" / f"memory-{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def title(found: dict[str, Any]) -> str:
    device = found["device"].removeprefix("NVIDIA ")
    return f"{found['model']}, {found['batch']} sequences of {found['seq_len']:,} tokens, one {device}"


def shares(row: dict[str, Any]) -> dict[str, float]:
    """GiB of the fullest moment, by whose they are."""
    held = {name: size / GIB for name, size in row["held"].items()}
    return {**held, REST: row["peak"] / GIB - sum(held.values())}


def measured(name: str) -> tuple[Sequence[str], Iterator[Sequence[str]]]:
    head = ("", *HELD, "the rest", "GiB", "predicted", "off", "s", "predicted ")
    return head, _rows(run(name)[name])


def _rows(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for row in rows:
        parts = [f"{gib:.1f}" for gib in shares(row).values()]
        total = sum(row["predicted"].values())
        memory = [f"{row['peak'] / GIB:.2f}", f"{total / GIB:.2f}", f"{100 * row['off']:+.1f} %"]
        yield (f"`{row['name']}`", *parts, *memory, f"{row['seconds']:.3f}", f"{row['predicted_seconds']:.3f}")
