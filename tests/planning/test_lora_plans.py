"""Plans of LoRA: the adapters alone have gradients and states, and frozen weights no weight-gradient GEMMs."""

from __future__ import annotations

import pytest

from echelon.planning.planner import find_plans
from echelon.planning.priced_plan import Plan

ADAPTERS = 32 * 16 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 2 * (4096 + 14336) + 4096 + 14336)
"""of rank 16 beside the seven linears of each of 32 layers"""


def plan(layout: str, rank: int = 16) -> Plan:
    return find_plans("llama-8b", "8xh100", batch=64, seq_len=4096, layout=layout, lora_rank=rank).plans[0]


def test_the_adapters_alone_have_gradients_and_states() -> None:
    parts = plan("dp=8,microbatch=1").memory.parts
    assert parts["parameters"] == pytest.approx(2 * (8.03e9 + ADAPTERS), rel=1e-3)
    assert parts["optimizer"] == pytest.approx(8 * ADAPTERS, rel=1e-3)
    assert parts["gradients"] == pytest.approx(4 * ADAPTERS, rel=1e-3)
    assert parts["master"] == pytest.approx(2 * ADAPTERS, rel=1e-3)


def test_zero_3_shards_the_frozen_weights_and_zero_2_does_not() -> None:
    kept, sharded = (plan(f"dp=8,zero={zero},microbatch=1").memory.parts for zero in (2, 3))
    assert kept["parameters"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert sharded.get("parameters", 0) == 0
    assert sharded["master"] == pytest.approx((2 * 8.03e9 + 4 * ADAPTERS) / 8, rel=1e-3)


def test_a_frozen_weight_has_no_gradient_gemm() -> None:
    frozen, trained = plan("dp=8,microbatch=1"), plan("dp=8,zero=2,microbatch=1", rank=0)
    assert 0.66 < frozen.times["products"] / trained.times["products"] < 0.75
    assert frozen.times["attention"] == pytest.approx(trained.times["attention"])
    assert frozen.times["dp"] < 0.1 * trained.times["dp"]
    assert frozen.times["update"] < 0.1 * trained.times["update"]


def test_adapters_cost_more_with_their_rank() -> None:
    assert plan("dp=8,microbatch=1", rank=256).seconds > plan("dp=8,microbatch=1", rank=8).seconds
