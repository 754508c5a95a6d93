"""Updates in backward: the same numbers as after it, and gradients that do not all live at once."""

from __future__ import annotations

from dataclasses import replace

import collective_cost_check
import pytest
import torch
from tiny_engines import batch_of, float64, largest_error, tiny, whole
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.training.engine import Engine

MODEL = tiny("llama", vocab=67, layers=3, max_seq_len=64)
RULES = (
    OptimizerConfig(lr=1e-2, in_backward=True),
    OptimizerConfig(name="adafactor", lr=1e-2, in_backward=True, ema=0.9),
)
STEPS, ROWS = 3, 4


def trained(layout: str, rule: OptimizerConfig) -> tuple[dict[str, Tensor], list[float]]:
    """On a rank: weights, and each step's loss and norm. The second step has no target."""
    options = float64()
    engine = Engine(models.build(MODEL, "meta", dtype=torch.float64), layout, rule, options=options)
    reported = []
    for step in range(STEPS):
        batch = batch_of(MODEL, ROWS, seed=step)
        if step == 1:
            batch["targets"].fill_(-100)
        result = engine.step(batch)
        reported += [result.loss, result.norm, float(result.skipped)]
    return whole(engine.parallel, "master"), reported


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_in_backward_equals_an_update_after_backward(pool: RankPool, rule: OptimizerConfig) -> None:
    layouts = ("", "accumulate=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2,accumulate=2", "dp=2,zero=3", "tp=2")
    truth, reported = pool.run(trained, 1, "", replace(rule, in_backward=False))[0]
    for layout in (*layouts, "dp=2,tp=2,zero=3,recompute=full"):
        found, numbers = pool.run(trained, Layout.parse(layout).world, layout, rule)[0]
        assert largest_error(found, truth) < 1e-10, layout
        assert numbers == pytest.approx(reported, rel=0, abs=1e-10), layout


def most_units(layout: str, rule: OptimizerConfig) -> tuple[int, int, int]:
    """On a rank: units, the most of them that had gradients at a time in the last backward, and those after it."""
    engine = Engine(models.build(MODEL, "meta"), layout, rule)
    units, most = engine.parallel.sharded_model.param_groups, 0

    def alive() -> int:
        return sum(unit.reduction.has_memory for unit in units)

    def look() -> None:
        nonlocal most
        most = max(most, alive())

    engine.parallel.sharded_model.on_grad = look
    engine.step(batch_of(MODEL, ROWS))
    return len(units), most, alive()


def test_gradients_of_two_groups_live_at_a_time(pool: RankPool) -> None:
    for layout in ("", "dp=2", "dp=2,zero=1", "dp=2,zero=3"):
        units, most, after = pool.run(most_units, Layout.parse(layout).world, layout, RULES[0])[0]
        assert units >= 5, "blocks, and what is around them"
        # The embedding's unit may have gradients of the head from the beginning.
        assert most <= 3, layout
        assert after == 0
    units, most, after = pool.run(most_units, 1, "", replace(RULES[0], in_backward=False))[0]
    assert most == after == units


@pytest.mark.parametrize("layout", ["dp=2,zero=2", "dp=2,tp=2,zero=3"])
def test_collectives_are_those_of_each_group(pool: RankPool, layout: str) -> None:
    collective_cost_check.check(pool, MODEL, layout, rule=RULES[1])


def refused(layout: str, clip: float) -> str:
    try:
        Engine(models.build(MODEL, "meta"), layout, RULES[0], clip=clip)
    except ValueError as error:
        return str(error)
    return ""


def test_incompatible_options_are_refused_with_the_reason(pool: RankPool) -> None:
    assert "use clip=0" in refused("", 1.0)
    assert "only the last stage knows" in pool.run(refused, 2, "pp=2", 0.0)[0]
