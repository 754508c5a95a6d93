"""Asynchronous pipelines equal an emulation of their published update rules on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engines import batch_of, engine_of, error, tiny, whole

from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.verification import emulation
from echelon.verification.emulation import version_of
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import VerifyCase

SHAPE = tiny("gpt", tied=False, layers=5, dropout=0.1)
CASE = VerifyCase(model=SHAPE, steps=4, seq_len=9, clip=0.5)
LAYOUTS = (
    "pp=2,accumulate=1",
    "pp=2,accumulate=3",
    "pp=3,accumulate=2",
    "pp=4,accumulate=1",
    "pp=4,accumulate=5,recompute=full",
    "dp=2,zero=0,pp=2,accumulate=2",
    "dp=2,zero=1,pp=3,accumulate=3",
    "tp=2,pp=2,accumulate=2",
    "tp=2,sp=0,pp=3,accumulate=1",
    "dp=2,tp=2,pp=2,accumulate=2,recompute=full",
)


@pytest.fixture(scope="module")
def prover(pool: RankPool) -> Verifier:
    return Verifier(pool, CASE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_a_schedule_follows_its_rule(prover: Verifier, schedule: str, layout: str) -> None:
    verdict = prover.verify_layout(Layout.parse(f"{layout},schedule={schedule}"))
    assert verdict.passed, verdict
    assert 0 < verdict.max_error <= TOLERANCE


def test_the_rules_are_those_that_were_published() -> None:
    """w(t+1) = w(t) - lr grad f(w_1(t-d+1), ..., w_d(t)); with vertical sync t-d+1 everywhere; 2BW w(max(t-1, 0))."""
    d, t = 4, 9
    assert [version_of("pipedream", stage, d, t, 1) for stage in range(d)] == [t - d + 1, t - 2, t - 1, t]
    assert [version_of("pipedream-vsync", stage, d, t, 1) for stage in range(d)] == [t - d + 1] * d
    assert [version_of("2bw", 0, d, batch * 5 + 2, 5) for batch in range(4)] == [0, 0, 1, 2]
    assert all(version_of(schedule, 0, d, 0, 1) == 0 for schedule in ASYNC_SCHEDULES)


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_another_update_rule_is_distinguished(pool: RankPool, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """The test above can fail: no other schedule's rule gives the same weights."""
    other = ASYNC_SCHEDULES[ASYNC_SCHEDULES.index(schedule) - 1]
    prover = Verifier(pool, CASE)
    layout = Layout.parse(f"pp=3,accumulate=2,schedule={schedule},microbatch=2")
    of_other_rule = prover._truth_file(CASE, layout.replace(schedule=other))
    monkeypatch.setattr(prover, "_truth_file", lambda case, layout: of_other_rule)
    assert not prover.verify_layout(layout).passed


# -- the stream -------------------------------------------------------------------------------------------------------

ADAMW = OptimizerConfig(lr=1e-2)


def steps_with(layout, evaluate, drain):
    """The weights after some steps, with or without an evaluation and a drain in the middle."""
    engine = engine_of(SHAPE, layout, optimizer=ADAMW, clip=0.5)
    rows = Layout.parse(layout).batch
    losses = []
    for step in range(4):
        losses.append(engine.step(batch_of(SHAPE, rows, seed=step)).loss)
        if evaluate:
            engine.evaluate(engine.microbatches(batch_of(SHAPE, rows, seed=9)))
        if drain and step == 1:
            engine.drain()
    engine.drain()
    engine.drain()  # nothing is left: it does nothing
    runtime = engine.pipeline.runtime
    return losses, whole(engine.parallel, "master"), len(runtime.weight_versions.stashed) + len(runtime._specs)


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_evaluation_does_not_touch_what_is_under_way(pool, schedule):
    layout = f"pp=3,accumulate=2,schedule={schedule}"
    plain, evaluated = (pool.run(steps_with, 3, layout, evaluate, False)[1] for evaluate in (False, True))
    assert plain[0] == evaluated[0]
    assert all(torch.equal(plain[1][name], evaluated[1][name]) for name in plain[1])
    assert plain[2] == 0, "a drained stream keeps no version, and no shapes of its microbatches"


def first_update(layout, evaluate):
    """The weights after one step, with or without an evaluation before it."""
    engine = engine_of(SHAPE, layout, optimizer=ADAMW, clip=0.5)
    rows = Layout.parse(layout).batch
    if evaluate:
        engine.evaluate(engine.microbatches(batch_of(SHAPE, rows, seed=9)))
    engine.step(batch_of(SHAPE, rows))
    engine.drain()
    return whole(engine.parallel, "master")


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_the_targets_of_an_evaluation_are_none_of_the_next_update(pool, schedule):
    layout = f"pp=2,accumulate=2,schedule={schedule}"
    plain, evaluated = (pool.run(first_update, 2, layout, evaluate)[0] for evaluate in (False, True))
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


def test_a_drained_stream_starts_again(pool):
    """A drain is a flush: later microbatches are computed on the weights of all updates before."""
    layout = "pp=3,accumulate=2,schedule=pipedream"
    plain, drained = (pool.run(steps_with, 3, layout, False, drain)[0] for drain in (False, True))
    assert plain[0][:2] == drained[0][:2]
    assert plain[0][2:] != drained[0][2:]
    assert all(error(drained[1][name], plain[1][name]) > 0 for name in ("blocks.0.attn.q.weight",))


def without_targets(layout):
    """Two equal engines; one of them sees a batch without a target in between."""
    found = []
    for empty in (False, True):
        engine = engine_of(SHAPE, layout, optimizer=ADAMW)
        batch = batch_of(SHAPE, 2)
        engine.step(batch)
        engine.drain()
        if empty:
            nothing = batch_of(SHAPE, 2)
            nothing["targets"].fill_(-100)
            result = engine.step(nothing)
            assert (result.skipped, result.count, result.loss) == (True, 0, 0.0)
            engine.drain()
        found.append(whole(engine.parallel, "master"))
    return found


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_a_batch_without_a_target_changes_nothing(pool, schedule):
    one, other = pool.run(without_targets, 2, f"pp=2,accumulate=2,schedule={schedule}")[0]
    assert all(torch.equal(one[name], other[name]) for name in one)


def moved_by_the_second_step(layout, rates):
    """The weights after steps of which one alone has a learning rate."""
    engine = engine_of(SHAPE, layout, clip=0.5)
    for step, lr in enumerate(rates):
        engine.step(batch_of(SHAPE, 2, seed=step), lr=lr)
    engine.drain()
    return whole(engine.parallel, "master")


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
def test_an_update_has_the_learning_rate_of_its_own_microbatches(pool, schedule):
    """Updates come one or more steps after the forwards: the rate that is in force by then is not theirs."""
    layout = f"pp=3,accumulate=1,microbatch=2,schedule={schedule}"
    moved = {rates: pool.run(moved_by_the_second_step, 3, layout, rates)[0] for rates in ((0.0, 0.1), (0.0, 0.1, 0.0))}
    still = pool.run(moved_by_the_second_step, 3, layout, (0.0, 0.0))[0]
    name = "blocks.0.attn.q.weight"
    assert error(moved[0.0, 0.1][name], still[name]) > 1e-6
    assert all(torch.equal(moved[0.0, 0.1][name], moved[0.0, 0.1, 0.0][name]) for name in still)
    late = pool.run(moved_by_the_second_step, 3, layout, (0.0, 0.0, 0.1))[0]
    assert error(late[name], moved[0.0, 0.1][name]) > 1e-6


def test_the_emulation_knows_no_list_of_actions() -> None:
    source = Path(emulation.__file__).read_text(encoding="utf-8")
    assert not any(module in source for module in ("pipeline.schedules", "execution.runtime", "pipeline.async_"))
