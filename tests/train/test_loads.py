"""How many tokens experts got, as a run tells it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from echelon import models
from echelon.launch.pool import Pool
from echelon.layout import Layout
from echelon.models import sizes
from echelon.proof.case import Case
from echelon.train.engine import Engine
from echelon.train.loads import Load

MODEL = replace(sizes.find("moe-tiny"), layers=2)


def test_what_is_said_of_a_layer() -> None:
    even = Load.of("a", torch.tensor([4, 4, 4, 4, 0]))
    assert (even.most, even.dead, even.dropped) == (1.0, 0, 0)
    assert even.entropy == pytest.approx(1.0)
    odd = Load.of("b", torch.tensor([8, 8, 0, 0, 5]))
    assert (odd.most, odd.dead, odd.dropped, odd.counts) == (2.0, 2, 5, (8, 8, 0, 0))
    assert odd.entropy == pytest.approx(math.log(2) / math.log(4))
    assert Load.of("c", torch.tensor([9, 0, 0, 0, 0])).entropy == 0.0


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
