"""How right the planner is, as `python bench/fit.py bench/published/measurements.csv --accuracy` found it, and whose
constants it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.planning.calibrate.constants import FITTED_CONSTANTS, NATIVE_OVERRIDES
from echelon.planning.calibrate.published_runs import REQUIRED_COLUMNS

PUBLISHED = Path(__file__).parents[1] / "bench" / "published"
STUDY = "aleph_layouts"


def found() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((PUBLISHED / "accuracy.json").read_text(encoding="utf-8"))
    return stored


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def sentence() -> str:
    left = found()["left out"]
    source, program = left["source"], left["program"]
    return (
        f"On {source['runs']:,} published runs of {source['sources']} sources, by constants that never saw the source, "
        f"its step time is off by {percent(source['time_median'])} in the median, averaged over\nsources "
        f"({percent(source['time_p90'])} at the 90th percentile), and {percent(source['shipped_coverage'], 0)} of the "
        f"runs lie inside the interval that it prints. By constants that never saw the program, it is off by "
        f"{percent(program['time_median'])}.\n[How it works, and how accurate it is](docs/planning.md).\n"
    )


def columns() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    seen, left = found()["fitted"], found()["left out"]
    all_columns = [*left.values(), seen]
    rows: list[tuple[str, ...]] = []
    for key, name in (("time_median", "step time, median error"), ("time_p90", "step time, 90th percentile")):
        rows.append((f"{name}, mean over sources", *(percent(one[key]) for one in all_columns)))
    rows.append(
        ("runs inside an interval from the other groups", *(percent(one["coverage"], 0) for one in left.values()), "")
    )
    printed = [*(one.get("shipped_coverage") for one in left.values()), seen["coverage"]]
    shares = ("" if share is None else percent(share, 0) for share in printed)
    rows.append(("runs inside the interval that plans print", *shares))
    empty = ("",) * len(left)
    rows.append(("half the interval, median", *empty, percent(seen["half_width"], 0)))
    rows.append(("fits or does not, balanced, layout study (574 runs)", *empty, percent(seen["fit_accuracy"][STUDY])))
    rows.append(("runs that ran and are predicted to fit", *empty, percent(seen["fits"])))
    regret = "regret in the layout study: how much slower the layout ranked first was than the best measured"
    rows.append((regret, *empty, percent(seen["regret"][STUDY])))
    regrets = list(seen["regret"].values())
    rows.append((f"regret, mean over {len(regrets)} sources", *empty, percent(sum(regrets) / len(regrets))))
    return ("", *(f"{name} left out" for name in left), "fitted"), rows


def own_constants() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = [(f"`{name}`", f"{getattr(FITTED_CONSTANTS, name):g}", f"{NATIVE_OVERRIDES[name]:g}") for name in OWN]
    assert OWN.keys() == NATIVE_OVERRIDES.keys()
    return ("constant", "other programs", "Echelon", "from"), [
        (*row, OWN[name]) for row, name in zip(rows, OWN, strict=True)
    ]


OWN = {
    "hopper": "fitted to steps on one H200",
    "hopper_fp8": "fitted to steps on one H200",
    "best_attention": "fitted to steps on one H200",
    "blackwell_attention": "taken to be the same",
    "memory_bandwidth": "fitted to steps on one H200",
    "expert_edge": "that of other GEMMs; steps of MoE models agree",
    "launch_experts": "counted: kernels of an MoE layer, 6 µs of the host each",
    "cast_bytes": "counted with each kernel instead",
    "edge": "an earlier fit, with which steps on one H200 agree",
    "misaligned_gemms": "an earlier fit, with which steps on one H200 agree",
    "launch": "steps of few tokens on one H200",
    "plain_score_bytes": "an earlier fit",
    "fused_score_bytes": "an earlier fit",
    "single_device_share": "none: the host is a step ahead of its device",
}


def table_columns() -> str:
    names = ", ".join(f"`{name}`" for name in REQUIRED_COLUMNS)
    return (
        f"A table for `echelon score` is a CSV with the columns {names}; with `layers` or `params_b`, and with a time: "
        "`step_time_s`, `tokens_per_s_per_gpu` or\n`tflops_per_gpu`. What else it may have is in the header of "
        "`bench/published/measurements.csv`, and `program` as `--program` has it;\nrules at the top of "
        "`planning/calibrate/published_runs.py` fill in what is blank.\n"
    )
