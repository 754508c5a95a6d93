"""Predicted against measured step time of a run, and the correction of later plans by it.

    RUN/measured.json   {"step_s", "memory_bytes", "predicted": {"step_s", "memory_bytes"} or {"reason"}, "ratio"}

The ratio is measured over predicted seconds of a step; none where nothing was predicted. `train` writes the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from echelon.input_file import InputFileError, read_json
from echelon.layout.validation_error import ValidationError
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.priced_plan import Plan

MEASURED_FILE = "measured.json"


def compare_prediction(predicted: Mapping[str, Any], seconds: Sequence[float], memory: int) -> dict[str, Any]:
    """The contents of the file, from the seconds of every step but the first, which allocates."""
    step = median(seconds[1:] or seconds)
    ratio = step / predicted["step_s"] if "step_s" in predicted else None
    return {"step_s": step, "memory_bytes": memory, "predicted": dict(predicted), "ratio": ratio}


def format_measured(measured: Mapping[str, Any]) -> str:
    """One line of text of the file."""
    predicted = measured["predicted"]
    if "step_s" not in predicted:
        return f"measured {_digits(measured['step_s'])} s a step; not predicted: {predicted['reason']}"
    return f"predicted {_digits(predicted['step_s'])} s a step, measured {_digits(measured['step_s'])} s"


def _digits(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.2g}"


def read_correction(run: str, cluster: Cluster | None = None) -> float:
    """The correction factor of a run for plans on a cluster. Raises ValidationError if it has none."""
    path, ended_run = Path(run) / MEASURED_FILE, "the folder of a run that ended, of a named model"

    def error(message: str, legal: str = ended_run, hint: str = "") -> ValidationError:
        return ValidationError.single("correct", run, message, legal=legal, hint=hint)

    try:
        measured = read_json(path)
    except InputFileError as cause:
        what = f"has a damaged {MEASURED_FILE}" if path.is_file() else "is not a run that ended"
        raise error(f"{what} ({cause})") from cause
    if not isinstance(measured, dict) or "ratio" not in measured or not isinstance(measured.get("predicted"), dict):
        raise error(f"has a damaged {MEASURED_FILE} (expected the keys ratio and predicted)")
    ratio, predicted = measured["ratio"], measured["predicted"]
    if ratio is None:
        raise error(f"was not predicted ({predicted.get('reason', 'no reason given')})")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not (math.isfinite(ratio) and ratio > 0):
        raise error(f"has a damaged {MEASURED_FILE} (ratio={ratio})", "a ratio > 0")
    if cluster is not None and cluster.curves is not None:
        rule = "was predicted without measured curves, which this cluster has: both would correct the same times"
        raise error(rule, "", "leave out --correct, or give the cluster by its name")
    device = predicted.get("device", "")
    if cluster is not None and device and device != cluster.device.name:
        rule = f"ran on {device}, and this is a plan for {cluster.device.name}"
        raise error(rule, f"a run on {cluster.device.name}")
    return float(ratio)


def note_correction(plan: Plan, run: str) -> Plan:
    note = f"Times are corrected by {plan.scenario.correction:.3g}, measured in {run}."
    return replace(plan, reasons=(note, *plan.reasons))
