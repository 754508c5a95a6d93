"""How many tokens experts got, as a run tells it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from echelon import models
from echelon.launch.pool import Pool
from echelon.layout import Layout
from echelon.models import sizes
from echelon.proof.case import Case
from echelon.train.engine import Engine
from echelon.train.load import Balance, Load, keeps_counts

MODEL = replace(sizes.find("moe-tiny"), layers=2)


def test_what_is_said_of_a_layer() -> None:
    even = Load.of("a", [4, 4, 4, 4], 0)
    assert (even.most, even.dead, even.dropped) == (1.0, 0, 0)
    assert even.entropy == pytest.approx(1.0)
    odd = Load.of("b", [8, 8, 0, 0], 5)
    assert (odd.most, odd.dead, odd.dropped, odd.assigned, odd.counts) == (2.0, 2, 5, 16, (8, 8, 0, 0))
    assert odd.entropy == pytest.approx(math.log(2) / math.log(4))
    assert Load.of("c", [9, 0, 0, 0], 0).entropy == 0.0
    nothing = Load.of("d", [0, 0], 0)
    assert (nothing.most, nothing.entropy, nothing.dead) == (0.0, 1.0, 2)


def test_what_is_said_of_all_layers() -> None:
    loads = [Load.of("blocks.0.mlp", [8, 8, 0, 0], 0), Load.of("blocks.1.mlp", [9, 3, 2, 2], 5)]
    found = Balance.of(loads)
    assert (found.most, found.most_layer) == (2.25, "blocks.1.mlp")
    assert (found.entropy, found.entropy_layer) == (loads[0].entropy, "blocks.0.mlp")
    assert (found.dead, found.dead_layer, found.experts) == (2, "blocks.0.mlp", 8)
    assert (found.dropped, found.dropped_layer, found.dropped_share) == (5, "blocks.1.mlp", 5 / 32)
    assert [f"{name} {value}" for name, value, _ in found.figures()] == [
        "max/mean 2.25 (blocks.1)",
        "entropy 0.50 (blocks.0)",
        "dead 2 of 8 (blocks.0)",
        "dropped 15.6 % (blocks.1)",
    ]


def test_counts_of_a_long_run_are_thinned_out() -> None:
    assert [sum(map(keeps_counts, range(1, steps + 1))) for steps in (999, 9_999, 99_999)] == [999, 1899, 2799]
    assert set(Load.of("a", [1, 2], 3).record(with_counts=False)) == {
        *("layer", "most", "entropy", "dead", "dropped", "assigned")
    }


def loads_of(text: str) -> list[Load]:
    layout = Layout.parse(text)
    engine = Engine(models.build(MODEL, "meta"), layout)
    engine.model.train()
    engine.step(Case(model=MODEL, seq_len=33).batch(0, layout.batch))
    return engine.loads.ask()()


def test_loads_are_those_of_the_whole_batch_on_every_rank(pool: Pool) -> None:
    alone = pool.run(loads_of, 1, "dp=1,microbatch=4")[0]
    assert [load.layer for load in alone] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert sum(alone[0].counts) == 4 * 33 * 2
    layouts = "dp=2,ep=2,microbatch=2; cp=2,microbatch=4; tp=2,ep=2,microbatch=4; pp=2,accumulate=2,microbatch=2"
    for text in (*layouts.split("; "), "dp=1,accumulate=2,microbatch=2,recompute=full"):
        for found in pool.run(loads_of, Layout.parse(text).world, text):
            assert found == alone, text
