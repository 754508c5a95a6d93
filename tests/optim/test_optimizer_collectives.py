"""What an optimizer sends is what it says, and a message is for all parameters together."""

from __future__ import annotations

import collective_cost_check
import pytest
from tiny_engines import tiny

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.training.engine import Engine

MODEL = tiny("llama", vocab=67, max_seq_len=64)
MOE = models.reduced_config(models.find_model("moe-tiny"), layers=1, width=16, vocab=67)


@pytest.mark.parametrize("layout", ["dp=2,tp=2,zero=3", "dp=2,pp=2,accumulate=2"])
@pytest.mark.parametrize("name", ["adafactor", "sm3", "lamb", "muon", "lion"])
def test_collectives_equal_the_optimizers_cost(pool: RankPool, name: str, layout: str) -> None:
    collective_cost_check.check(pool, MODEL, layout, rule=OptimizerConfig(name=name))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_collectives_of_experts(pool: RankPool, name: str) -> None:
    collective_cost_check.check_together(pool, MOE, "dp=4,ep=2,zero=1", rule=OptimizerConfig(name=name))


def issued(layout: str, rule: OptimizerConfig) -> list[tuple[str, str]]:
    engine = Engine(models.build(MODEL, "meta"), layout, rule)
    return [(found.op, found.axis) for found in engine.optimizer.collectives()]


def test_one_all_reduce_for_all_parameters(pool: RankPool) -> None:
    for name, wanted in {
        "adamw": [],
        "lion": [],
        "sm3": ["all_reduce"],
        "lamb": ["all_reduce"],
        "adafactor": ["all_reduce", "all_reduce"],
        "muon": ["all_to_all", "all_to_all"],
    }.items():
        for layout, axis in (("dp=2,zero=3", "shard*tp"), ("tp=2", "shard*tp"), ("dp=2", "")):
            found = pool.run(issued, Layout.parse(layout).world, layout, OptimizerConfig(name=name))[0]
            assert found == [(kind, axis) for kind in wanted if axis], (name, layout)
