"""Every optimizer equals its paper on one device, and on equal gradients itself in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_engines import batch_of, error, tiny, whole

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.model_config import ModelConfig
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.training.engine import Engine
from tests.optim import references
from tests.optim.references import Reference, State
from tests.optim.same_gradients import SCALE, SKIPPED, STEPS, Fed, fed, gradient

TOLERANCE = 1e-10
GROUPS = ("embed*:lr=0.5", "*norm*:weight_decay=0.3", "blocks.0.*:lr=0.1,weight_decay=0.01")


def rule(name: str, **changes: object) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.05, **changes)  # type: ignore[arg-type]


RULES = {
    "adamw": rule("adamw", groups=GROUPS),
    "sgd": rule("sgd", momentum=0.9, groups=GROUPS),
    "lion": rule("lion", groups=GROUPS),
    "lamb": rule("lamb", groups=GROUPS),
    "adafactor": rule("adafactor"),
    "adafactor with momentum": rule("adafactor", momentum=0.9, groups=GROUPS),
    "sm3": rule("sm3"),
    "sm3 with momentum": rule("sm3", momentum=0.9, groups=GROUPS),
    "muon": rule("muon", groups=GROUPS),
    "average": rule("adamw", ema=0.9),
}
REFERENCES: dict[str, Reference] = {
    "adamw": references.adamw,
    "sgd": references.sgd,
    "lion": references.lion,
    "lamb": references.lamb,
    "adafactor": references.adafactor(),
    "adafactor with momentum": references.adafactor(0.9),
    "sm3": references.sm3(),
    "sm3 with momentum": references.sm3(0.9),
    "muon": references.muon,
}
LLAMA = tiny("llama", vocab=67)
"""a vocabulary that divides by nothing"""
TIED = tiny("gpt", tied=True, layers=2, vocab=67)
MOE = models.reduced_config(models.find_model("moe-tiny"), layers=1, width=16, vocab=67)
CONV = models.find_model("conv-tiny")


def own(name: str, shape: tuple[int, ...], grouped: bool) -> tuple[float, float]:
    """(factor of the learning rate, weight decay), by hand."""
    lr, decay = 1.0, 0.1 if len(shape) > 1 else 0.0
    if grouped and name.startswith("embed"):
        lr = 0.5
    if grouped and "norm" in name:
        decay = 0.3
    if grouped and name.startswith("blocks.0."):
        lr, decay = 0.1, 0.01
    return lr, decay


def by_reference(shape: ModelConfig, name: str) -> dict[str, torch.Tensor]:
    chosen, found = RULES[name], {}
    for key, parameter in models.build(shape, "cpu", dtype=torch.float64).named_parameters():
        size, reference = tuple(parameter.shape), REFERENCES[name]
        if chosen.name == "muon" and not is_muon_matrix(chosen, key, size):
            reference = references.adamw
        flat = shape.family == "conv" and len(size) == 4  # a filter is a row for each output
        w, state, t = parameter.detach().numpy().copy(), State(), 0
        factor, decay = own(key, size, bool(chosen.groups))
        for step in range(STEPS):
            g = gradient(key, size, step).numpy() * SCALE
            if step != SKIPPED:
                t += 1
                rows = (lambda x: x.reshape(len(x), -1)) if flat else (lambda x: x)
                w = reference(rows(w), rows(g), state, t, chosen.lr / (1 + step) * factor, decay).reshape(size)
        found[key] = torch.from_numpy(np.asarray(w))
    return found


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [LLAMA, MOE, CONV], ids=lambda shape: shape.name)
def test_each_rule_equals_its_papers_reference(name: str, shape: ModelConfig) -> None:
    if shape is CONV and RULES[name].groups:
        pytest.skip("its parameters have other names than the groups")
    check_against_reference(shape, name)


def check_against_reference(shape: ModelConfig, name: str) -> None:
    (found,) = fed(shape, "dp=1", [RULES[name]])
    for key, value in by_reference(shape, name).items():
        assert error(found.values[key], value) < TOLERANCE, key
    assert found.bytes == found.claimed


def test_lamb_updates_matrices_that_start_at_zero() -> None:
    """Both matrices of a noisy gate: without a weight norm the trust ratio is 1."""
    assert MOE.moe is not None
    check_against_reference(replace(MOE, moe=replace(MOE.moe, gate="noisy-top-k")), "lamb")


def test_lamb_leaves_a_matrix_without_a_gradient_as_it_is() -> None:
    """Without an update norm, too, the trust ratio is 1: an infinite one would make NaN of zeros."""
    engine = Engine(torch.nn.Linear(3, 2), "", rule("lamb", weight_decay=0.0))
    before = whole(engine.parallel, "master")
    engine.optimizer.step(0.05, torch.ones((), dtype=torch.float64), torch.tensor(True))
    after = whole(engine.parallel, "master")
    assert all(torch.equal(after[name], value) for name, value in before.items())


def check(pool: RankPool, shape: ModelConfig, *layouts: str) -> None:
    """Each rule on each layout against itself on one rank, and the bytes that it holds against its cost."""
    rules = list(RULES.values())
    (truths,) = pool.run(fed, 1, shape, "dp=1", rules)
    for layout in layouts:
        ranks: list[list[Fed]] = pool.run(fed, Layout.parse(layout).world, shape, layout, rules)
        for index, name in enumerate(RULES):
            found, truth = ranks[0][index].values, truths[index].values
            assert found.keys() == truth.keys()
            size, key = max((error(found[key], value), key) for key, value in truth.items())
            assert size < TOLERANCE, f"{layout}: {name}: {key} is off by {size}"
            for rank in ranks:
                assert rank[index].bytes == rank[index].claimed, f"{layout}: {name}"


def test_data_parallel(pool: RankPool) -> None:
    check(pool, LLAMA, "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=3,zero=3")


def test_tensor_parallel(pool: RankPool) -> None:
    """A vocabulary that does not divide, and keys and values that are on two ranks each."""
    check(pool, LLAMA, "tp=2", "tp=2,sp=0", "tp=4", "dp=2,tp=2,zero=3", "tp=4,tp_kind=2d")


def test_pipelines(pool: RankPool) -> None:
    check(pool, LLAMA, "pp=2", "dp=2,pp=2,zero=3")


def test_experts(pool: RankPool) -> None:
    check(pool, MOE, "dp=2,ep=2", "dp=4,ep=2,zero=3", "dp=4,ep=2,etp=2")


@pytest.mark.soak
def test_more_layouts(pool: RankPool) -> None:
    check(pool, LLAMA, "dp=2,cp=2,zero=1", "dp=4,shard=2,zero=2", "tp=8,tp_kind=2.5d,depth=2")
    check(pool, tiny("llama", vocab=67, heads=8), "tp=8,tp_kind=3d")
    check(pool, MOE, "tp=2,ep=2", "dp=2,tp=2,ep=2,etp=2,zero=1", "dp=2,tp=2,ep=2,zero=3")
    check(pool, replace(MOE, layers=2), "dp=2,pp=2,ep=2,zero=1")
    check(pool, TIED, "pp=2", "dp=2,tp=2,zero=3", "tp=4")


def test_copies_of_a_tied_weight_stay_equal_bit_for_bit(pool: RankPool) -> None:
    rules = [RULES[name] for name in ("lamb", "adafactor", "sm3", "muon")]
    ranks = pool.run(fed, 6, TIED, "dp=3,pp=2,zero=1", rules)
    for here, there in zip(ranks[:3], ranks[3:], strict=True):
        for a, b in zip(here, there, strict=True):
            assert a.tied
            assert all(torch.equal(x, y) for x, y in zip(a.tied, b.tied, strict=True))


@pytest.mark.parametrize("name", ["lamb", "adafactor", "sm3", "muon"])
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "tp=2"])
def test_a_missing_collective_is_detected(pool: RankPool, layout: str, name: str) -> None:
    kind = "all_to_all" if name == "muon" else "all_reduce"
    (truth,) = fed(LLAMA, "dp=1", [RULES[name]])
    (found,) = pool.run(fed, 2, LLAMA, layout, [RULES[name]], False, f"shard*tp:{kind}")[0]
    assert max(error(found.values[key], value) for key, value in truth.values.items()) > 1e-6


SHORT = {**RULES, "bfloat16": rule("adamw", states="bfloat16"), "int8": rule("adamw", states="int8")}


@pytest.mark.parametrize("name", SHORT)
def test_split_master_weights_are_updated_as_unsplit_ones(name: str) -> None:
    (exact,) = fed(LLAMA, "accumulate=2", [SHORT[name]])
    (whole,) = fed(LLAMA, "accumulate=2", [SHORT[name]], compute=torch.float32)
    (halves,) = fed(LLAMA, "accumulate=2", [SHORT[name]], compute=torch.bfloat16)
    assert halves.bytes == halves.claimed == whole.bytes
    for key, value in whole.values.items():
        assert error(halves.values[key], value) < 1e-6, key
        assert error(value, exact.values[key]) < (2e-2 if name == "bfloat16" else 1e-3), key


def test_bfloat16_moments_differ_by_their_precision(pool: RankPool) -> None:
    """Chance goes by an element's place on its rank: the same under dp, another under tp and pp. 8 bits hold 1/256."""
    short = [SHORT["bfloat16"]]
    ((truth,),) = pool.run(fed, 1, LLAMA, "", short)
    first = dict(models.build(LLAMA, "cpu", dtype=torch.float64).named_parameters())
    for layout in ("dp=2", "dp=2,zero=1", "dp=3,zero=3", "tp=2", "pp=2"):
        found = pool.run(fed, Layout.parse(layout).world, LLAMA, layout, short)[0][0]
        for key, value in truth.values.items():
            if layout.startswith("dp"):
                assert error(found.values[key], value) < TOLERANCE, (layout, key)
            assert (found.values[key] - value).norm() < (value - first[key]).norm() / 128, (layout, key)


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor", "sm3 with momentum", "muon", "int8"])
def test_every_optimizer_learns(name: str) -> None:
    """One batch by heart, with the rates that the documentation names."""
    rates = {"lion": 3e-3, "lamb": 3e-2, "adafactor": 3e-2, "sm3 with momentum": 1e-1}
    chosen = replace(SHORT[name], lr=rates.get(name, 1e-2), groups=())
    engine = Engine(models.build(LLAMA, "meta"), "", chosen, clip=1.0)
    batch = batch_of(LLAMA, 4)
    losses = [engine.step(batch).loss for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0], losses[-1]
