"""What the planner says of updates, beside what an H200 took for them (bench/optimizers.py)."""

from __future__ import annotations

import pytest

from echelon.config.sections import OptimizerConfig
from echelon.optim import cost
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster import cluster

ELEMENTS = 0.973e9
MEASURED = {
    "adamw": (OptimizerConfig(), 6.93),
    "moments in bfloat16": (OptimizerConfig(states="bfloat16"), 5.13),
    "in 8 bits": (OptimizerConfig(states="int8"), 10.47),
    "lion": (OptimizerConfig(name="lion"), 4.30),
    "sgd": (OptimizerConfig(name="sgd", momentum=0.9), 4.26),
    "average": (OptimizerConfig(ema=0.99), 6.93 + 2.77),
    "lamb": (OptimizerConfig(name="lamb"), 35.67),
    "adafactor": (OptimizerConfig(name="adafactor"), 69.62),
    "sm3": (OptimizerConfig(name="sm3"), 20.69),
}
"""milliseconds, with masters in two halves"""


@pytest.mark.parametrize("name", MEASURED)
def test_an_update_takes_what_it_moves(name: str) -> None:
    rule, measured = MEASURED[name]
    speed = cluster.parse_cluster("1xh200").device.bandwidth * FITTED_CONSTANTS.memory_bandwidth
    assert 1e3 * ELEMENTS * cost.update_traffic_bytes(rule, gradient_bytes=2) / speed == pytest.approx(
        measured, rel=0.25
    )


@pytest.mark.parametrize("name", ["adafactor", "sm3", "sgd"])
def test_momentum_is_read_and_written(name: str) -> None:
    momentum, plain = (
        cost.update_traffic_bytes(OptimizerConfig(name=name, momentum=momentum)) for momentum in (0.9, 0.0)
    )
    assert momentum - plain == 2 * 4
