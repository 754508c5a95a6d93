"""What every way to save memory leaves: measured on an H200, beside what the planner says. For tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from echelon.config.run_config import Config
from echelon.layout import Layout
from echelon.models import model_config
from echelon.planning.cluster import cluster
from echelon.planning.cost.memory_model import peak_memory
from echelon.training.run.prediction import scenario_of

GIB = 1 << 30
FILE = Path(__file__).parents[1] / "bench" / "measured" / "h200-memory.json"
STACKED, ALONE = "llama-3b", "llama-1b"
PARTS = {
    "parameters": ("parameters",),
    "master": ("master",),
    "moments": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "working", "logits", "buffers"),
}
"""of the planner's categories"""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    peak: float
    """GiB, measured"""
    planned: dict[str, float]
    """GiB by part, of the fullest moment"""

    @property
    def total(self) -> float:
        return sum(self.planned.values())


@cache
def rows(model: str) -> tuple[Row, ...]:
    found = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return tuple(
        Row(name=row["name"], peak=row["peak_gib"], planned=planned(row["settings"]))
        for row in found
        if f"model={model}" in row["settings"]
    )


def planned(settings: Sequence[str]) -> dict[str, float]:
    config = Config.load(None, list(settings))
    shape = config.override_model(model_config.find_model(config.model))
    parts = peak_memory(scenario_of(config, Layout.parse(config.layout), shape, cluster.parse_cluster("1xh200"))).parts
    return {name: sum(parts.get(part, 0) for part in of) / GIB for name, of in PARTS.items()}


def measured(model: str) -> tuple[Sequence[str], Iterator[Sequence[str]]]:
    return ("", *PARTS, "planned", "measured", "off"), _table_rows(model)


def _table_rows(model: str) -> Iterator[Sequence[str]]:
    for row in rows(model):
        parts = [f"{gib:.1f}" if gib >= 0.05 else "·" for gib in row.planned.values()]
        off = f"{100 * (row.total / row.peak - 1):+.1f} %"
        yield f"`{row.name}`" if "=" in row.name else row.name, *parts, f"{row.total:.2f}", f"{row.peak:.2f}", off
