from __future__ import annotations

import math

import pytest
import torch
from laid_out import engine_of, tiny

from echelon.train.norm import _joined, clip_factor, owned_runs


def test_neighbouring_runs_become_one():
    assert list(_joined([(0, 2), (2, 5), (7, 8), (8, 9)])) == [(0, 5), (7, 9)]
    assert list(_joined([])) == []
    assert list(_joined([(3, 3)])) == []


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_the_factor_never_enlarges(norm, limit, factor):
    assert float(clip_factor(torch.tensor(norm), limit)) == pytest.approx(factor, rel=1e-5)


def owned():
    engine = engine_of(tiny("llama", kv_heads=1), "dp=2,tp=4,zero=3")
    runs = owned_runs(engine.parallel)
    return sum(len(unit.grad[part]) for unit, part in runs), len(runs), len(engine.parallel.flat.units)


def test_all_ranks_together_own_every_parameter_once(pool):
    ranks = pool.run(owned, 8)
    assert sum(count for count, _, _ in ranks) == tiny("llama", kv_heads=1).parameters
    assert all(runs <= 3 * units for _, runs, units in ranks), "few long runs, not one per parameter"


def not_finite(value):
    engine = engine_of(tiny(), "tp=2")
    unit, piece = next(pair for pair in engine.parallel.flat.pieces() if pair[1].entry.name == "embed.weight")
    if engine.parallel.axes["tp"].index == 1:
        engine.parallel.flat.view(unit.grad, piece)[0] = value
    return float(engine.norm()), float(engine.norm(math.inf))


def test_one_bad_element_on_one_rank_is_seen_by_all(pool):
    for two, largest in pool.run(not_finite, 2, math.inf):
        assert math.isinf(two)
        assert math.isinf(largest)
    for two, _ in pool.run(not_finite, 2, math.nan):
        assert math.isnan(two)
