"""All gradients set to 1. The norm is sqrt(unique parameters), clipping scales all alike, the inf-norm is 1."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_engines import batch_of, engine_of, float64, tiny, whole
from torch import nn

from echelon.layout import Layout
from echelon.models.moe_config import MoEConfig
from echelon.training.engine import Engine
from echelon.training.grad_norm import clip_factor

SHAPES = {
    "dense": tiny("llama"),
    "tied": tiny("gpt", tied=True),
    "replicated kv heads": tiny("llama", kv_heads=1),
    "one kv head, tied, odd vocabulary": tiny("llama", kv_heads=1, tied=True, vocab=61),
}
MIXTURES = {
    "experts": tiny("llama", moe=MoEConfig(experts=8, k=2, ffn=12, gate="mixtral")),
    "experts in every second layer, a shared one, tied": tiny(
        "gpt",
        tied=True,
        moe=MoEConfig(experts=4, k=2, ffn=12, gate="qwen", shared_ffn=8, activation="gelu", every=2),
    ),
}
LAYOUTS = (
    "dp=1",
    "dp=2",
    "dp=3,zero=1",
    "dp=4,zero=3,shard=2",
    "tp=4",
    "dp=2,tp=2,zero=3",
    "pp=2",
    "dp=2,tp=2,pp=2,zero=3",
)

FOLDED = (
    "dp=2,ep=2",
    "dp=2,etp=2",
    "dp=4,ep=2,etp=2",
    "tp=2,ep=2",
    "dp=2,tp=2,etp=2",
    "dp=2,tp=2,ep=4",
    "cp=2,ep=2",
    *(f"dp=4,ep=2,zero={zero}" for zero in (1, 2, 3)),
    "dp=2,tp=2,ep=2,etp=2,zero=3",
    "pp=2",
    "dp=2,pp=2,ep=2,zero=1",
)


def ones(name, layout):
    """Fill full shards, with their padding and with every replica of a head, as a careless sum would."""
    engine = engine_of((SHAPES | MIXTURES)[name], layout)
    for unit in engine.parallel.sharded_model.param_groups:
        unit.grad.fill_(1.0)
    norm, largest = float(engine.grad_norm()), float(engine.grad_norm(math.inf))
    engine.optimizer.step(0.0, clip_factor(engine.grad_norm(), 0.5), torch.tensor(True))
    clipped = whole(engine.parallel)
    return norm, largest, float(engine.grad_norm()), {float(g) for grad in clipped.values() for g in grad.unique()}


@pytest.mark.parametrize("name", [*SHAPES, *MIXTURES])
def test_norm_counts_every_parameter_once(pool, name):
    expected = math.sqrt((SHAPES | MIXTURES)[name].parameters)
    for layout in FOLDED if name in MIXTURES else LAYOUTS:
        for norm, largest, after, values in pool.run(ones, Layout.parse(layout).world, name, layout):
            assert norm == pytest.approx(expected, rel=1e-12), layout
            assert largest == 1.0
            assert after == pytest.approx(0.5, rel=1e-5)
            assert len(values) == 1, "clipping scales all alike"
            assert values.pop() == pytest.approx(0.5 / expected, rel=1e-5)


class Ones(nn.Module):
    """Its mean loss is the sum of its parameters, so each gradient is 1; one of them has two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(7, 5, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return sum(p.sum() for p in self.parameters() if p.requires_grad) * len(x), torch.tensor(len(x))


def through_a_step(layout, clip):
    engine = Engine(Ones().double(), layout, clip=clip, options=float64())
    result = engine.step({"x": torch.zeros(12, 1)})
    return result.norm, float(engine.grad_norm()), float(engine.grad_norm(math.inf))


@pytest.mark.parametrize("layout", ["dp=2,accumulate=2", "dp=3,zero=1", "dp=4,zero=3,shard=2"])
def test_real_gradients_of_one(pool, layout):
    count = 7 * 5 + 5
    for before, after, largest in pool.run(through_a_step, Layout.parse(layout).world, layout, 2.0):
        assert before == pytest.approx(math.sqrt(count), rel=1e-12)
        assert after == pytest.approx(2.0, rel=1e-6)
        assert largest == pytest.approx(2.0 / math.sqrt(count), rel=1e-6)


def clipped_step(name, layout):
    shape = (SHAPES | MIXTURES)[name]
    engine = engine_of(shape, layout, clip=1e-3)
    norm = engine.step(batch_of(shape, 4, length=8)).norm
    return norm, float(engine.grad_norm())


@pytest.mark.parametrize(("name", "layout"), [("tied", "tp=4"), ("experts", "dp=2,tp=2,ep=2,etp=2,zero=1")])
def test_clipping_in_a_step_is_the_same_in_every_layout(pool, name, layout):
    alone, *_ = pool.run(clipped_step, 1, name, "dp=1")
    for found in pool.run(clipped_step, 4, name, layout):
        assert found == pytest.approx(alone, rel=1e-10)
    assert alone[0] > 1e-3
    assert alone[1] == pytest.approx(1e-3, rel=1e-2)
