"""What the planner says of every way to save memory, beside what an H200 had in use (bench/memory.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.config.run_config import Config
from echelon.layout import Layout
from echelon.models import model_config
from echelon.planning.cluster import cluster
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.memory_model import peak_memory
from echelon.training.run.prediction import scenario_of

FILE = Path(__file__).parents[2] / "bench" / "measured" / "h200-memory.json"
ROWS = json.loads(FILE.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['settings'][0]}, {row['name']}")
def test_memory_is_within_five_per_cent(row: dict[str, Any]) -> None:
    config = Config.load(None, row["settings"])
    shape = config.override_model(model_config.find_model(config.model))
    found = peak_memory(scenario_of(config, Layout.parse(config.layout), shape, cluster.parse_cluster("1xh200")))
    # The allocator, which was asked, does not see the device's context.
    assert (found.total - found.parts["reserve"]) / GIB == pytest.approx(row["peak_gib"], rel=0.05)
