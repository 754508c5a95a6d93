"""The average of the weights is what it says, in every layout, and evaluation uses it and gives the weights back."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batch_of, float64, one_device, tiny, whole

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.optim.torch_rules import build_torch_optimizer
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

RULE = OptimizerConfig(lr=1e-2, ema=0.8)
MODEL = tiny("llama", vocab=67, tied=True)
STEPS, ROWS = 3, 4


def trained(layout: str) -> tuple[float, bool]:
    """On a rank: the loss of an evaluation, and whether the weights are the same after it, bit for bit."""
    engine = Engine(models.build(MODEL, "meta", dtype=torch.float64), layout, RULE, clip=1.0, options=float64())
    for step in range(STEPS):
        engine.step(batch_of(MODEL, ROWS, seed=step))
    before = whole(engine.parallel, "master")
    loss = engine.evaluate(engine.microbatches(batch_of(MODEL, ROWS, seed=9)))
    assert loss is not None
    after = whole(engine.parallel, "master")
    engine.step(batch_of(MODEL, ROWS, seed=STEPS))
    return loss, all(torch.equal(after[name], value) for name, value in before.items())


def by_hand() -> float:
    model, averaged = one_device(MODEL), one_device(MODEL)
    optimizer = build_torch_optimizer(RULE, dict(model.named_parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = model(**batch_of(MODEL, ROWS, seed=step))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, new in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.copy_(0.8 * mean + 0.2 * new)
    with torch.no_grad():
        total, count = averaged.eval()(**batch_of(MODEL, ROWS, seed=9))
    return float(total / count)


def test_evaluation_uses_the_average_in_every_layout(pool: RankPool) -> None:
    wanted = by_hand()
    for layout in ("", "dp=2,zero=3", "tp=2", "pp=2,accumulate=2", "dp=2,tp=2,zero=1"):
        for loss, same in pool.run(trained, Layout.parse(layout).world, layout):
            assert loss == pytest.approx(wanted, rel=0, abs=1e-10), layout
            assert same


def test_the_average_stays_in_a_step_without_targets() -> None:
    """As the weights do: it would come nearer to them."""
    engine = Engine(models.build(MODEL, "meta", dtype=torch.float64), "", RULE, options=float64())
    assert engine.ema is not None
    engine.step(batch_of(MODEL, ROWS))
    before = [average.clone() for average in engine.ema.states()]
    batch = batch_of(MODEL, ROWS)
    engine.step(batch | {"targets": torch.full_like(batch["targets"], -100)})
    assert all(torch.equal(average, kept) for average, kept in zip(engine.ema.states(), before, strict=True))


def test_split_weights_are_swapped_bit_for_bit() -> None:
    engine = Engine(torch.nn.Linear(5, 3), "", RULE, options=ParallelOptions(compute_dtype=torch.bfloat16))
    (unit,) = engine.parallel.sharded_model.param_groups
    first = unit.master.values()
    unit.master.set_values(0, first + 1e-4)
    now = unit.master.values()
    with engine.ema_weights():
        assert torch.equal(unit.master.values(), first)
        with engine.ema_weights():
            assert torch.equal(unit.master.values(), first)
    assert torch.equal(unit.master.values(), now)


def asynchronous() -> str:
    try:
        Engine(models.build(tiny("llama"), "meta"), "pp=2,schedule=pipedream,accumulate=2", RULE)
    except ValueError as error:
        return str(error)
    return ""


def test_an_asynchronous_schedule_is_refused(pool: RankPool) -> None:
    assert "schedule=pipedream, optimizer.ema=0.8" in pool.run(asynchronous, 2)[0]
