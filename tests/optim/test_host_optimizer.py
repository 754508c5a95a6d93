"""States on the host: every rule that may have them there makes the update that it makes on the device."""

from __future__ import annotations

import pytest
import torch
from offload_engines import SHAPE, engine_away, stepped
from tiny_engines import batch_of, largest_error, whole

from echelon import models
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import ValidationError
from echelon.optim import offload_support
from echelon.training.engine import Engine

GROUPS = ("embed*:lr=0.5", "*norm*:weight_decay=0.1", "blocks.1.*:lr=0.1,weight_decay=0.01")
RULES = {
    "adamw": OptimizerConfig(lr=1e-2),
    "sgd": OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9),
    "lion": OptimizerConfig(name="lion", lr=1e-3, weight_decay=0.1),
    "groups": OptimizerConfig(lr=1e-2, groups=GROUPS),
    "groups of lion": OptimizerConfig(name="lion", lr=1e-3, groups=GROUPS),
    "int8": OptimizerConfig(lr=1e-2, states="int8"),
}
KINDS = ("optimizer", "params", "disk", "params+disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_host_update_equals_the_devices(rule: OptimizerConfig, kind: str) -> None:
    plain, away = (stepped(engine_away(layout, rule)) for layout in ("accumulate=2", f"accumulate=2,offload={kind}"))
    assert largest_error(whole(away.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
    sizes = [sum(state.nbytes for state in engine.optimizer.states() if state.dim()) for engine in (plain, away)]
    assert sizes[1] == sizes[0]


def trained(layout: str, rule: OptimizerConfig, share: float) -> dict[str, torch.Tensor]:
    return whole(stepped(engine_away(layout, rule, host_share=share)).parallel, "master")


@pytest.mark.parametrize("name", ["lion", "groups"])
def test_the_host_update_of_shards_equals_the_devices(pool: RankPool, name: str) -> None:
    truth = trained("dp=1,accumulate=2", RULES[name], 0.0)
    for layout in ("dp=2,zero=1,offload=optimizer", "dp=2,zero=3,offload=params"):
        assert largest_error(pool.run(trained, 2, layout, RULES[name], 0.5)[0], truth) <= 1e-10


@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
def test_moments_of_every_dtype_are_on_the_host(states: str) -> None:
    """Of float32 masters."""
    rule = OptimizerConfig(lr=1e-2, states=states)
    engine = Engine(models.build(SHAPE, "meta"), "offload=optimizer", rule)
    for step in range(2):
        engine.step(batch_of(SHAPE, 4, seed=step))
    found = {state.dtype for state in engine.optimizer.states() if state.dim() > 0}
    kinds = {"float32": {torch.float32}, "bfloat16": {torch.bfloat16}}
    assert found == kinds.get(states, {torch.uint8, torch.float32})


# -- averages ---------------------------------------------------------------------------------------------------------

EMA = OptimizerConfig(lr=1e-2, ema=0.8)


@pytest.mark.parametrize("kind", ["optimizer", "params"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_average_is_where_the_weights_are(kind: str, share: float) -> None:
    plain, away = engine_away("", EMA), engine_away(f"offload={kind}", EMA, host_share=share)
    batch = batch_of(SHAPE, 4, seed=9)
    for step in range(2):
        for engine in (plain, away):
            engine.step(batch_of(SHAPE, 4, seed=step))
        losses = [engine.evaluate(engine.microbatches(batch)) for engine in (plain, away)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        assert largest_error(whole(away.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
    assert away.ema is not None
    assert plain.ema is not None
    for there, here in zip(away.ema.states(), plain.ema.states(), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)


def test_the_average_does_not_change_in_a_step_without_targets() -> None:
    engine = stepped(engine_away("offload=optimizer", EMA), 1)
    engine.drain()
    assert engine.ema is not None
    before = [state.clone() for state in engine.ema.states()]
    nothing = batch_of(SHAPE, 4)
    nothing["targets"].fill_(-100)
    assert engine.step(nothing).skipped
    engine.drain()
    assert all(torch.equal(*pair) for pair in zip(before, engine.ema.states(), strict=True))


# -- what cannot be ---------------------------------------------------------------------------------------------------

REFUSED = (
    (OptimizerConfig(in_backward=True), "optimizer", "optimizer.in_backward"),
    (EMA, "optimizer+disk", "optimizer.ema"),
)


@pytest.mark.parametrize(("rule", "kind", "key"), REFUSED)
def test_rules_that_the_host_cannot_update_are_refused(rule: OptimizerConfig, kind: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}=.*offload={kind.replace('+', '.')}.*; legal: "):
        Engine(models.build(SHAPE, "meta"), f"offload={kind}", rule)
    assert list(offload_support.offload_faults(rule, "activations")) == []


def test_the_configuration_refuses_unsupported_rules() -> None:
    with pytest.raises(ValidationError) as refused:
        Config.load(None, ["layout=offload=optimizer", "optimizer.name=muon", "optimizer.in_backward=true", "clip=0"])
    assert {fault.key for fault in refused.value.issues} == {"optimizer.in_backward"}
