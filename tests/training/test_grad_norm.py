from __future__ import annotations

import math

import pytest
import torch
from tiny_engines import engine_of, tiny

from echelon.training.grad_norm import clip_factor, gradient_slices


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping_never_enlarges_gradients(norm, limit, factor):
    assert float(clip_factor(torch.tensor(norm), limit)) == pytest.approx(factor, rel=1e-5)


def owned():
    engine = engine_of(tiny("llama", kv_heads=1), "dp=2,tp=4,zero=3")
    parts = gradient_slices(engine.parallel)
    return sum(len(part.group.grad[part.span]) for part in parts if part.is_counted)


def test_every_parameter_is_counted_once_over_all_ranks(pool):
    assert sum(pool.run(owned, 8)) == tiny("llama", kv_heads=1).parameters


def not_finite(value):
    engine = engine_of(tiny(), "tp=2")
    unit, piece = next(pair for pair in engine.parallel.sharded_model.pieces() if pair[1].param.name == "embed.weight")
    if engine.parallel.axes["tp"].index == 1:
        engine.parallel.sharded_model.piece_view(unit.grad, piece)[0] = value
    return float(engine.grad_norm()), float(engine.grad_norm(math.inf))


def test_one_nan_on_one_rank_makes_the_norm_nan_on_all(pool):
    for two, largest in pool.run(not_finite, 2, math.inf):
        assert math.isinf(two)
        assert math.isinf(largest)
    for two, _ in pool.run(not_finite, 2, math.nan):
        assert math.isnan(two)


def copy_not_finite():
    """Without sequence parallelism every rank has the same gradients of norms, and the first rank counts them."""
    engine = engine_of(tiny(), "tp=2,sp=0")
    unit, piece = next(pair for pair in engine.parallel.sharded_model.pieces() if pair[1].param.name == "norm.weight")
    if engine.parallel.axes["tp"].index == 1:
        engine.parallel.sharded_model.piece_view(unit.grad, piece)[0] = math.inf
    return float(engine.grad_norm()), piece.is_owner


def test_a_nan_in_an_uncounted_replica_makes_the_norm_nan_on_all(pool):
    assert [(math.isfinite(norm), owner) for norm, owner in pool.run(copy_not_finite, 2)] == [
        (False, True),
        (False, False),
    ]
