"""Bytes and seconds of operators and conversions."""

from __future__ import annotations

import pytest
from sharding_op_lists import S0, S1, S2, B, P, R

from echelon.parallel.auto_sharding.cost import (
    conversion_collectives,
    conversion_seconds,
    forward_cost,
    param_state_bytes,
    partial_grad_reduction,
    saved_activation_bytes,
    step_cost,
)
from echelon.parallel.auto_sharding.sharding import ShardableOp, Sharding, Strategy
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingCost

LINK = AxisLink(size=4, bandwidth=100.0, latency=1.0, flops_rate=10.0, memory_bandwidth=5.0)
OP = ShardableOp(
    name="x",
    op="linear",
    inputs=(0, 1),
    strategies=(Strategy((R, R), R),),
    shape=(20, 10),
    element_bytes=2,
    flops=400.0,
    traffic_bytes=100.0,
    saved_bytes=60.0,
)
COLUMN, ROW = Strategy((B, S0), S2, 0.25), Strategy((S2, S1), P, 0.25)
RING, HALF = 400 * 2 * 3 / 4 / 100 + 1, 400 * 3 / 4 / 100 + 1
"""seconds of an all-reduce, and of an all-gather or reduce-scatter"""


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (R, R, (0, 0)),
        (R, B, (0, RING)),
        (P, R, (RING, 0)),
        (P, B, (RING, RING)),
        (S0, R, (HALF, 0)),
        (R, S0, (0, HALF)),
        (P, S0, (HALF, HALF)),
        (S0, B, (HALF, HALF)),
        (S0, S1, (1.75, 1.75)),
        (B, S0, (0, 0)),
    ],
    ids=str,
)
def test_conversions_take_their_rings(source: Sharding, target: Sharding, seconds: tuple[float, float]) -> None:
    assert conversion_seconds(OP, source, target, LINK) == pytest.approx(seconds)


def test_an_all_to_all_starts_from_a_slice() -> None:
    assert [(item.op, item.bytes, item.purpose) for item in conversion_collectives(OP, S0, S1, 4)] == [
        ("all_to_all", 100, "forward"),
        ("all_to_all", 100, "backward"),
    ]
    assert list(conversion_collectives(OP, S0, S1, 1)) == []


def test_an_operator_takes_the_longer_of_flops_and_bytes() -> None:
    assert forward_cost(OP, COLUMN, LINK) == ShardingCost(compute=10.0)
    memory_bound = AxisLink(size=4, bandwidth=100.0, latency=1.0, flops_rate=1e3, memory_bandwidth=5.0)
    assert forward_cost(OP, COLUMN, memory_bound) == ShardingCost(traffic=5.0)
    assert step_cost(OP, COLUMN, LINK, 8, False) == ShardingCost(compute=10.0 * 3 * 8)
    assert step_cost(OP, COLUMN, LINK, 8, True) == ShardingCost(compute=10.0 * 4 * 8)


def test_partial_gradients_are_reduced_once_a_step() -> None:
    weight = ShardableOp(name="w", op="param", inputs=(), strategies=(), shape=(20, 10), element_bytes=2, param="w")
    assert step_cost(weight, Strategy((), B), LINK, 8, False).collectives == pytest.approx(RING - 1)
    assert step_cost(weight, Strategy((), S0), LINK, 8, False).total == 0
    assert partial_grad_reduction(OP, B, 4) is None
    assert param_state_bytes(weight, Strategy((), S0), 4, 16.0) == 200 * 16 / 4
    assert param_state_bytes(weight, Strategy((), B), 4, 16.0) == 200 * 16


def test_saved_tensors_lie_as_they_are_read() -> None:
    assert saved_activation_bytes(OP, COLUMN, 4, (400, 0)) == 60
    assert saved_activation_bytes(OP, ROW, 4, (400, 0)) == 15
    assert saved_activation_bytes(OP, Strategy((R, S0), S2), 4, (300, 100)) == 60 * (300 + 25) / 400
    assert saved_activation_bytes(OP, Strategy((R, S0), S2), 4, (0, 0)) == 15
