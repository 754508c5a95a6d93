"""Steps that `echelon bench` measured, as planner scenarios, to compare predicted with measured step times.

{"device": "NVIDIA H200", "date": ..., "rows": [...]}       rows as `echelon bench --json` has them

In place of a `shape` a row may have a `model`, with the number of `layers` that were kept of it, or a `file.py:factory`
beside the folder of the JSON file. Rows without other settings are of Echelon in bf16, and recompute nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.bench.measurement import ECHELON
from echelon.bench.profile.min_bytes import STATE_BYTES
from echelon.bench.reference_shapes import REFERENCE_SHAPES, reference_model
from echelon.layout import Layout
from echelon.planning.cluster import cluster
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.scenario import Scenario

DEFAULT_SETTINGS = {"who": ECHELON, "failed": None, "precision": "bf16", "states": "float32", "recompute": "none"}
PLANNED_PRECISION = {"fp8-row": "fp8"}
"""precisions that the planner does not distinguish"""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The measured step of a scenario on one device."""

    scenario: Scenario
    precision: str
    """of the matmuls, as measured"""
    states: str
    seconds: float
    peak_bytes: int
    """of torch's allocator, without the CUDA context"""


def read_steps(path: Path | str) -> list[MeasuredStep]:
    """Read every row of ours that did not fail."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = [{**DEFAULT_SETTINGS, **row} for row in record["rows"]]
    return list(_steps(rows, record["device"].rpartition(" ")[2].lower(), Path(path).resolve().parents[1]))


def _shape(row: Mapping[str, Any], modules: Path) -> ModelShape:
    if "shape" in row:
        return config_shape(reference_model(REFERENCE_SHAPES[row["shape"]].size, row["seq"]))
    if ".py:" in row["model"]:
        # Where the checkout is says nothing of the model.
        return replace(resolve_shape(str(modules / row["model"])), name=f"{modules.name}/{row['model']}")
    record = reference_model(row["model"], row["seq"])
    if "layers" in row:
        record = replace(record, name=f"{record.name}, {row['layers']} layers", layers=row["layers"])
    return config_shape(record)


def _steps(rows: list[dict[str, Any]], kind: str, modules: Path) -> Iterator[MeasuredStep]:
    for row in rows:
        if row["who"] != ECHELON or row["failed"]:
            continue
        precision, states = row["precision"], row["states"]
        scenario = Scenario(
            shape=_shape(row, modules),
            cluster=cluster.parse_cluster(f"1x{kind}"),
            layout=Layout(microbatch=row["batch"], recompute=row["recompute"]),
            seq_len=row["seq"],
            precision=PLANNED_PRECISION.get(precision, precision),
            moment_bytes=STATE_BYTES[states],
        )
        seconds, peak = row["step_s"], int(row["peak_bytes"])
        yield MeasuredStep(scenario=scenario, precision=precision, states=states, seconds=seconds, peak_bytes=peak)
