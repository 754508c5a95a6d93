"""How many tokens experts got, as a run tells it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import echelon as ec
from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.moe.experts import Experts
from echelon.moe.gates.top_k import Mixtral
from echelon.moe.moe_layer import MoELayer
from echelon.training.engine import Engine
from echelon.training.logging.expert_load import ExpertLoad, LoadBalance, logs_counts
from echelon.training.logging.expert_load_counter import experts_per_moe_layer
from echelon.verification.verify_case import VerifyCase

MODEL = replace(model_config.find_model("moe-tiny"), layers=2)


def test_a_step_without_targets_keeps_the_gate_bias() -> None:
    """It moved, though nothing was updated."""
    engine = Engine(
        models.build(replace(model_config.override_config(MODEL, gate="loss-free,speed=0.5"), layers=1), "meta")
    )
    engine.model.train()
    bias = engine.model.blocks[0].mlp.gate.bias
    batch = VerifyCase(model=MODEL, seq_len=9).batch(0, 2)
    assert engine.step({**batch, "targets": torch.full_like(batch["targets"], -100)}).skipped
    assert float(bias.abs().max()) == 0
    engine.step(batch)
    assert float(bias.abs().max()) == 0.5


def test_expert_load_of_a_layer() -> None:
    even = ExpertLoad.from_counts("a", [4, 4, 4, 4], 0)
    assert (even.most, even.dead, even.dropped) == (1.0, 0, 0)
    assert even.entropy == pytest.approx(1.0)
    odd = ExpertLoad.from_counts("b", [8, 8, 0, 0], 5)
    assert (odd.most, odd.dead, odd.dropped, odd.assigned, odd.counts) == (2.0, 2, 5, 16, (8, 8, 0, 0))
    assert odd.entropy == pytest.approx(math.log(2) / math.log(4))
    assert ExpertLoad.from_counts("c", [9, 0, 0, 0], 0).entropy == 0.0
    nothing = ExpertLoad.from_counts("d", [0, 0], 0)
    assert (nothing.most, nothing.entropy, nothing.dead) == (0.0, 1.0, 2)


def test_load_balance_of_all_layers() -> None:
    loads = [
        ExpertLoad.from_counts("blocks.0.mlp", [8, 8, 0, 0], 0),
        ExpertLoad.from_counts("blocks.1.mlp", [9, 3, 2, 2], 5),
    ]
    found = LoadBalance.from_loads(loads)
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


def test_expert_counts_of_a_long_run_are_logged_less_often() -> None:
    assert [sum(map(logs_counts, range(1, steps + 1))) for steps in (999, 9_999, 99_999)] == [999, 1899, 2799]
    assert set(ExpertLoad.from_counts("a", [1, 2], 3).record(with_counts=False)) == {
        *("layer", "most", "entropy", "dead", "dropped", "assigned")
    }


def loads_of(text: str) -> list[ExpertLoad]:
    layout = Layout.parse(text)
    engine = Engine(models.build(MODEL, "meta"), layout)
    engine.model.train()
    engine.step(VerifyCase(model=MODEL, seq_len=33).batch(0, layout.batch))
    return engine.expert_loads.start_read()()


def test_expert_load_is_global_on_every_rank(pool: RankPool) -> None:
    alone = pool.run(loads_of, 1, "dp=1,microbatch=4")[0]
    assert [load.layer for load in alone] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert sum(alone[0].counts) == 4 * 33 * 2
    layouts = "dp=2,ep=2,microbatch=2; cp=2,microbatch=4; tp=2,ep=2,microbatch=4; pp=2,accumulate=2,microbatch=2"
    for text in (*layouts.split("; "), "dp=1,accumulate=2,microbatch=2,recompute=full"):
        for found in pool.run(loads_of, Layout.parse(text).world, text):
            assert found == alone, text


class Own(nn.Module):
    """A user's module with other numbers of experts in each layer, and none in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([*(MoELayer(Mixtral(8, e, 2), Experts(e, 8, 6)) for e in (4, 6)), nn.Identity()])
        self.out = nn.Linear(8, 11)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = None
        for link in self.pipeline_model().layers:
            carried = link.run(carried, None, words=words)
        assert isinstance(carried, tuple)
        return carried

    def pipeline_model(self) -> ec.PipelineModel:
        layers = (ec.PipelineLayer(f"layers.{i}", (f"layers.{i}",), self._layer(i)) for i in range(3))
        first = ec.PipelineLayer("embed", ("embed",), lambda _carried, _shared, words: self.embed(words))
        return ec.PipelineModel(layers=(first, *layers, ec.PipelineLayer("out", ("out",), self._last)))

    def _layer(self, index: int):  # type: ignore[no-untyped-def]
        layer = self.layers[index]
        return lambda x, _shared, **_: layer(x)[0] if isinstance(layer, MoELayer) else x + x

    def _last(self, x: torch.Tensor, _shared: None, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(self.out(x).flatten(0, 1), words.flatten(), reduction="sum"), torch.tensor(words.numel())


def loads_of_own(text: str) -> list[ExpertLoad]:
    torch.manual_seed(0)
    engine = Engine(Own(), Layout.parse(text))
    engine.model.train()
    engine.step({"words": torch.arange(44).view(4, 11) % 11})
    return engine.expert_loads.start_read()()


def test_stages_of_a_custom_model_know_moe_layers_of_other_stages(pool: RankPool) -> None:
    """A rank without an MoE layer skipped the all-reduce, and ranks with one hung in it."""
    alone = pool.run(loads_of_own, 1, "dp=1,microbatch=4")[0]
    assert [(load.layer, len(load.counts), load.assigned) for load in alone] == [
        ("layers.0", 4, 88),
        ("layers.1", 6, 88),
    ]
    for text in ("dp=2,ep=2,microbatch=2", "pp=2,accumulate=2,microbatch=2", "pp=3,accumulate=2,microbatch=2"):
        for found in pool.run(loads_of_own, Layout.parse(text).world, text):
            assert found == alone, text


def asynchronous_loads() -> list[list[ExpertLoad]]:
    layout = Layout.parse("pp=2,schedule=pipedream,accumulate=4,microbatch=1")
    engine = Engine(models.build(MODEL, "meta"), layout)
    engine.model.train()
    asked = []
    for step in range(3):
        engine.step(VerifyCase(model=MODEL, seq_len=33).batch(step, layout.batch))
        asked.append(engine.expert_loads.start_read())
    engine.drain()
    return [ask() for ask in asked]


def test_expert_load_of_an_asynchronous_schedule(pool: RankPool) -> None:
    """Stages are at different microbatches, but none is counted twice."""
    first, second = pool.run(asynchronous_loads, 2)
    assert first == second
    for layer in range(2):
        reported = [loads[layer].assigned for loads in first]
        assert all(reported)
        assert sum(reported) <= 3 * 4 * 33 * 2
    gate = replace(MODEL, moe=replace(MODEL.moe, gate="loss-free"))
    with pytest.raises(ValueError, match=r"balances by the loads of a step \(blocks.0.mlp.gate\) has none"):
        experts_per_moe_layer(models.build(gate, "meta"), Layout.parse("pp=2,schedule=2bw"))
