"""How sure a prediction is: its interval, and whether anything near was measured.

Intervals are conformal: four of five runs of a source lie within `spread` of a prediction by constants that were fitted
to the other sources (`bench/fit.py --leave-out`). Where nothing near was measured they are wider, and a plan says why.
"""

from __future__ import annotations

import math

from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.planning.calibrate.constants import Constants
from echelon.planning.scenario import Scenario

MEASURED_KINDS = (
    *("v100", "a100-40", "a100-80", "h100", "h200", "b200", "b300", "gb200", "gb300"),
    *("mi250x", "ascend910b", "tpu-v5e", "tpu-v5p"),
)
"""device kinds of published runs, and the H200 of ours"""
MAX_MEASURED_DEVICES, MAX_MEASURED_SEQ_LEN = 12_288, 262_144


def extrapolations(scenario: Scenario) -> list[str]:
    """What of a scenario is far from all measured runs; empty if nothing is."""
    layout, device, curves = scenario.layout, scenario.cluster.device, scenario.cluster.curves
    has_curves = curves is not None and bool(curves.matmul and curves.memory)  # of `echelon bench`
    facts = (
        (device.name not in MEASURED_KINDS and not has_curves, f"no run on {device.name} was measured"),
        (scenario.program == "unknown", "no run of this program was measured"),
        (layout.world > MAX_MEASURED_DEVICES, f"runs of up to {MAX_MEASURED_DEVICES:,} devices were measured"),
        (scenario.seq_len > MAX_MEASURED_SEQ_LEN, f"sequences of up to {MAX_MEASURED_SEQ_LEN:,} tokens were measured"),
        (layout.tp_kind != "1d", f"no run with tp_kind={layout.tp_kind} was measured"),
        (layout.schedule in ASYNC_SCHEDULES, f"no run with schedule={layout.schedule} was measured"),
    )
    return [reason for is_far, reason in facts if is_far]


def interval_factor(scenario: Scenario, c: Constants) -> float:
    """The factor, up and down, within which four of five runs lie."""
    spread = c.spread_experts if scenario.shape.experts else c.spread
    if extrapolations(scenario):
        return math.exp(spread * c.spread_far)
    return math.exp(c.spread_own if scenario.has_kernels and scenario.layout.world == 1 else spread)
