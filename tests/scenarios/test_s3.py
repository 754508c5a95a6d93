"""S3: all gradients set to 1. The norm is sqrt(unique parameters), clipping scales all alike, the inf-norm is 1."""

from __future__ import annotations

import math

import pytest
import torch
from laid_out import batch_of, engine_of, float64, tiny, whole
from torch import nn

from echelon.layout import Layout
from echelon.train.engine import Engine
from echelon.train.norm import clip_factor

SHAPES = {
    "dense": tiny("llama"),
    "tied": tiny("gpt", tied=True),
    "replicated kv heads": tiny("llama", kv_heads=1),
    "one kv head, tied, odd vocabulary": tiny("llama", kv_heads=1, tied=True, vocab=61),
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


def ones(name, layout):
    """Fills whole shards, with their padding and with every copy of a replicated head, as a careless sum would."""
    engine = engine_of(SHAPES[name], layout)
    for unit in engine.parallel.flat.units:
        unit.grad.fill_(1.0)
    norm, largest = float(engine.norm()), float(engine.norm(math.inf))
    engine.optimizer.step(0.0, clip_factor(engine.norm(), 0.5), torch.tensor(True))
    clipped = whole(engine.parallel)
    return norm, largest, float(engine.norm()), {float(g) for grad in clipped.values() for g in grad.unique()}


@pytest.mark.parametrize("name", SHAPES)
def test_norm_counts_every_parameter_once(pool, name):
    expected = math.sqrt(SHAPES[name].parameters)
    for layout in LAYOUTS:
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
    return result.norm, float(engine.norm()), float(engine.norm(math.inf))


@pytest.mark.parametrize("layout", ["dp=2,accumulate=2", "dp=3,zero=1", "dp=4,zero=3,shard=2"])
def test_real_gradients_of_one(pool, layout):
    count = 7 * 5 + 5
    for before, after, largest in pool.run(through_a_step, Layout.parse(layout).world, layout, 2.0):
        assert before == pytest.approx(math.sqrt(count), rel=1e-12)
        assert after == pytest.approx(2.0, rel=1e-6)
        assert largest == pytest.approx(2.0 / math.sqrt(count), rel=1e-6)


def clipped_step(layout):
    engine = engine_of(SHAPES["tied"], layout, clip=1e-3)
    norm = engine.step(batch_of(SHAPES["tied"], 4)).norm
    return norm, float(engine.norm())


def test_clipping_in_a_step_is_the_same_in_every_layout(pool):
    found = {layout: pool.run(clipped_step, Layout.parse(layout).world, layout)[0] for layout in ("dp=1", "tp=4")}
    assert found["tp=4"] == pytest.approx(found["dp=1"], rel=1e-10)
    assert found["dp=1"][0] > 1e-3
    assert found["dp=1"][1] == pytest.approx(1e-3, rel=1e-2)
