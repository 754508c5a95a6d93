"""A tied embedding on the first and the last stage is counted once, and both copies stay equal to the last bit."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batch_of, engine_of, tiny

from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout

SHAPE = tiny("gpt", tied=True, layers=4)
LAYOUTS = (
    "pp=2,accumulate=2",
    "pp=4,accumulate=4",
    "dp=2,pp=2,zero=3,accumulate=2",
    "dp=2,pp=4,zero=3,accumulate=2",
    "dp=2,pp=2,zero=3,schedule=zb-v,accumulate=2",
    "tp=2,pp=2,accumulate=2",
)


def after_ten_steps(layout):
    """(place on pp, first weights, last weights, elements counted, elements held) of the tied matrix on this rank."""
    engine = engine_of(SHAPE, layout, optimizer=OptimizerConfig(lr=1e-2), clip=1.0)
    held = [(u, p) for u, p in engine.parallel.sharded_model.pieces() if p.param.name == "embed.weight"]
    before = [engine.parallel.sharded_model.piece_view(unit.master.values(), piece).clone() for unit, piece in held]
    for step in range(10):
        engine.step(batch_of(SHAPE, Layout.parse(layout).batch, seed=step))
    after = [engine.parallel.sharded_model.piece_view(unit.master.values(), piece).clone() for unit, piece in held]
    counted = sum(
        stop - start
        for _, piece in held
        if piece.is_owner and piece.is_first_replica
        for start, stop in piece.unpadded_runs()
    )
    return engine.parallel.axes.coordinates, before, after, counted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_copies_stay_equal_and_count_once(pool, layout):
    ranks = pool.run(after_ten_steps, Layout.parse(layout).world, layout)
    assert sum(counted for _, _, _, counted in ranks) == SHAPE.vocab * SHAPE.width
    copies = {}
    for at, before, after, _ in ranks:
        for old, new in zip(before, after, strict=True):
            assert not torch.equal(old, new), "nothing was learned"
            copies.setdefault((at["dp"], at["tp"]), []).append(new)
    shared = 1 if "zb-v" in layout else 2  # there both stages are on one rank, and there is one copy
    for found in copies.values():
        assert len(found) == shared
        assert all(torch.equal(found[0], other) for other in found)


def test_the_copies_diverge_without_their_all_reduce(pool):
    """The test above can fail."""
    import echelon as ec

    (verdict,) = ec.verify("gpt-tiny", "pp=2", pool=pool, leave_out="pp[0+1]:all_reduce", steps=1).verdicts
    assert not verdict.passed
    assert (verdict.first_difference.name, verdict.axis) == ("embed.weight", "pp")
