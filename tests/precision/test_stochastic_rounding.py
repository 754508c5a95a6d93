"""Stochastic rounding of bfloat16 weights without master weights: unbiased, and the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_engines import tiny, whole
from torch import nn

from echelon import models, rng
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.layout.placement import DimSplit, LogicalParam, ParamGroupSpec, Placement
from echelon.models.moe_config import MoEConfig
from echelon.optim.stochastic_rounding import parameter_indices
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

ALONE = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16)
SHAPE = tiny("llama", kv_heads=1)
EXPERTS = tiny("llama", moe=MoEConfig(experts=4, k=2, ffn=12, gate="mixtral"))
RULES = {
    "adamw": OptimizerConfig(lr=1e-3),
    "short moments": OptimizerConfig(lr=1e-3, states="bfloat16"),
    "sgd": OptimizerConfig(name="sgd", lr=1e-3, momentum=0.9),
    "lion": OptimizerConfig(name="lion", lr=1e-3),
    "lamb": OptimizerConfig(name="lamb", lr=1e-3),
    "adafactor": OptimizerConfig(name="adafactor", lr=1e-3),
    "sm3": OptimizerConfig(name="sm3", lr=1e-3),
    "muon": OptimizerConfig(name="muon", lr=1e-3),
}


def updated(shape, layout, rule, steps=3):
    """Gradients are drawn by name and element: no product of matrices, which not every CPU does in bfloat16."""
    engine = Engine(models.build(shape, "meta"), layout, RULES[rule], options=ALONE)
    one, live = torch.ones((), dtype=torch.float64), torch.tensor(True)
    for step in range(steps):
        for unit, piece in engine.parallel.sharded_model.pieces():
            entry, place = piece.param, engine.parallel.sharded_model.piece_view(unit.grad, piece)
            window = {dim: (low, entry.shape[dim]) for dim, (low, _) in enumerate(piece.box)}
            for start, stop in piece.unpadded_runs():
                index = rng.logical_index(entry.local_shape, window, start, stop, torch.device("cpu"))
                drawn = rng.normal(rng.key(step, entry.name), index).bfloat16()  # of any type that gradients may have
                place[start - piece.start : stop - piece.start] = drawn
        engine.optimizer.step(RULES[rule].lr, one, live)
        engine.parallel.sharded_model.after_update()
    return whole(engine.parallel, "master")


LAYOUTS = ("dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=3,zero=3", "tp=2", "tp=4,tp_kind=2d", "pp=2", "dp=2,tp=2,zero=3")


@pytest.mark.parametrize("rule", RULES)
def test_every_layout_rounds_alike(pool, rule):
    (truth,) = pool.run(updated, 1, SHAPE, "dp=1", rule)
    for layout in LAYOUTS if rule == "adamw" else ("dp=3,zero=3", "tp=2", "pp=2"):
        found = pool.run(updated, Layout.parse(layout).world, SHAPE, layout, rule)[0]
        assert found.keys() == truth.keys()
        assert [name for name in truth if not torch.equal(found[name], truth[name])] == [], layout


def test_experts_are_rounded_alike(pool):
    (truth,) = pool.run(updated, 1, EXPERTS, "dp=1", "adamw")
    for layout in ("dp=2,ep=2", "dp=4,ep=2,etp=2", "dp=4,ep=2,zero=3"):
        found = pool.run(updated, Layout.parse(layout).world, EXPERTS, layout, "adamw")[0]
        assert [name for name in truth if not torch.equal(found[name], truth[name])] == [], layout


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400, 100))

    def forward(self, x):
        return (self.weight.float() * x.float().sum()).sum(), torch.tensor(len(x))


def forty_steps(rule):
    """A step is a 40th of what the nearest neighbour of 1 is away: rounded to the nearest nothing would ever change."""
    found = []
    for options in (ALONE, ParallelOptions(compute_dtype=torch.bfloat16)):
        engine = Engine(Slope(), "dp=1", rule, options=options)
        for _ in range(40):
            engine.step({"x": torch.ones(2)})
        found.append(whole(engine.parallel, "master")["weight"])
    return found


@pytest.mark.parametrize("rule", [*RULES.values(), OptimizerConfig(states="int8")], ids=[*RULES, "8 bits"])
def test_small_updates_add_up(pool, rule):
    lr = 2.0**-8 / (2 if rule.name == "muon" else 40)  # an orthogonal matrix of rank 1 has small elements
    rule = replace(rule, lr=lr, momentum=0.0 if rule.name == "sgd" else None, weight_decay=0.0)
    ((found, exact),) = pool.run(forty_steps, 1, rule)
    if rule.name in ("adamw", "sgd", "lion", "lamb"):
        assert float(exact.mean()) == pytest.approx(1 - 2.0**-8, rel=1e-4)
    assert 1e-4 < 1 - float(exact.mean()) < 5e-3
    assert float(found.mean()) == pytest.approx(float(exact.mean()), abs=3e-5), "40,000 elements, each off by 0.002"
    assert len(found.unique()) > 1


def averaged():
    engine = Engine(Slope(), "dp=1", OptimizerConfig(lr=1e-3, ema=0.9), options=ALONE)
    for _ in range(3):
        engine.step({"x": torch.ones(2)})
    (exact,), before = engine.ema.states(), whole(engine.parallel, "master")["weight"]
    kept = exact.clone()
    with engine.ema_weights():
        shown = whole(engine.parallel, "master")["weight"]
    after = whole(engine.parallel, "master")["weight"]
    return exact.dtype, torch.equal(exact, kept), torch.equal(before, after), shown.reshape(-1), kept


def test_the_average_of_rounded_weights_is_exact(pool):
    ((dtype, kept, back, shown, exact),) = pool.run(averaged, 1)
    assert (dtype, kept, back) == (torch.float32, True, True)
    assert torch.equal(shown, exact.bfloat16().double()), "evaluation has it rounded to the nearest"
    assert not torch.equal(shown, exact.double())


def test_each_evaluation_swaps_the_weights_of_its_time():
    """The weights that one evaluation had saved would come back after the next."""
    engine = Engine(Slope(), "dp=1", OptimizerConfig(lr=1e-3, ema=0.9), options=ALONE)
    for _ in range(2):
        engine.step({"x": torch.ones(2)})
        before, average = whole(engine.parallel, "master")["weight"], engine.ema.states()[0]
        with engine.ema_weights():
            shown = whole(engine.parallel, "master")["weight"]
        assert torch.equal(shown.reshape(-1), average.bfloat16().double())
        assert torch.equal(whole(engine.parallel, "master")["weight"], before)


def left_out():
    engine = Engine(Slope(), "dp=1", OptimizerConfig(), options=ALONE)
    engine.step({"x": torch.ones(2)})
    before = whole(engine.parallel, "master")["weight"]
    engine.optimizer.step(1e-3, torch.tensor(float("nan"), dtype=torch.float64), torch.tensor(False))
    return torch.equal(whole(engine.parallel, "master")["weight"], before)


def test_a_step_without_targets_rounds_nothing(pool):
    assert pool.run(left_out, 1) == [True]


def first(options):
    return whole(Engine(models.build(SHAPE, "meta"), "dp=1", options=options).parallel, "master")


def test_initial_weights_are_rounded_master_weights(pool):
    (short,), (long,) = (pool.run(first, 1, options) for options in (ALONE, ParallelOptions()))
    assert all(torch.equal(short[name], long[name].bfloat16().double()) for name in long)


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((6, 8), ()),
        ((6, 8), (DimSplit(axis="tp", dim=0, num_parts=2),)),
        ((6, 8), (DimSplit(axis="tp", dim=1, num_parts=2),)),
        ((7, 8), (DimSplit(axis="tp", dim=0, num_parts=2), DimSplit(axis="ep", dim=1, num_parts=2))),
        ((4, 6, 8), (DimSplit(axis="ep", dim=0, num_parts=2), DimSplit(axis="tp", dim=1, num_parts=2))),
        ((4, 6, 8), (DimSplit(axis="ep", dim=0, num_parts=2), DimSplit(axis="tp", dim=2, num_parts=2))),
        ((4, 6, 3, 3), (DimSplit(axis="tp", dim=1, num_parts=2),)),
        ((8,), (DimSplit(axis="tp", dim=0, num_parts=2),)),
        ((), ()),
    ],
)
def test_element_indices_are_those_in_the_full_parameter(shape, cuts):
    entry = LogicalParam(name="a.weight", names=("a.weight",), shape=shape, splits=cuts)
    at = {"tp": 1, "ep": 1, "shard": 1, "replica": 0, "pp": 0}
    unit = ParamGroupSpec(name="", params=(entry,), num_shards=2)
    piece = Placement(param_groups=(unit,), coordinates=at).piece(unit, entry)
    place = parameter_indices(piece, 0)
    window = {dim: (low, entry.shape[dim]) for dim, (low, _) in enumerate(piece.box)}
    for start, stop in piece.unpadded_runs():
        index = rng.logical_index(entry.local_shape, window, start, stop, torch.device("cpu"))
        found = place.advance(start - piece.start).compute(stop - start, torch.device("cpu"))
        assert torch.equal(found, index)


def test_other_dtypes_without_master_weights_are_refused():
    with pytest.raises(ValueError, match="requires bfloat16"):
        ParallelOptions(compute_dtype=torch.float16, master_dtype=torch.float16)
    with pytest.raises(ValueError, match="in a user's loop"):
        ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16, user_loop=True)
