"""What plans say of optimizers is what optimizers hold and send."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engines import tiny

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.collective import wire_bytes
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.optim import cost
from echelon.planning.cluster import cluster
from echelon.planning.cost.memory_model import stage_memory, state_bytes_by_category
from echelon.planning.cost.optimizer_update import optimizer_state_bytes, param_matrices, update_comm
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario
from echelon.training.engine import Engine

RULES = {
    "adamw": OptimizerConfig(),
    "bfloat16": OptimizerConfig(states="bfloat16"),
    "int8": OptimizerConfig(states="int8"),
    "sgd": OptimizerConfig(name="sgd"),
    "momentum": OptimizerConfig(name="sgd", momentum=0.9),
    "lion": OptimizerConfig(name="lion"),
    "lamb": OptimizerConfig(name="lamb"),
    "adafactor": OptimizerConfig(name="adafactor"),
    "adafactor, momentum": OptimizerConfig(name="adafactor", momentum=0.9),
    "sm3": OptimizerConfig(name="sm3"),
    "muon": OptimizerConfig(name="muon"),
    "ema": OptimizerConfig(ema=0.99),
}
SIZES: dict[str, Any] = {"layers": 3, "width": 64, "heads": 4, "ffn": 256, "vocab": 256, "max_seq_len": 64}
SHAPES = {
    "llama": tiny(**SIZES),
    "gpt": tiny("gpt", **SIZES, kv_heads=4, tied=True),
    "mixture": tiny(**SIZES, moe=MoEConfig(experts=4, k=2, ffn=64, gate="mixtral")),
}


def case_of(shape: ModelConfig, layout: str, rule: OptimizerConfig, devices: str = "1xcpu") -> Scenario:
    return Scenario(
        shape=config_shape(shape),
        cluster=cluster.parse_cluster(devices),
        layout=Layout.parse(layout),
        seq_len=64,
        precision="fp32",
        optimizer=rule,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SHAPES)
def test_optimizer_state_equals_a_runs_to_the_byte(name: str, rule: str) -> None:
    shape = SHAPES[name]
    engine = Engine(models.build(shape, "meta"), "dp=1", RULES[rule])
    held = cost.rank_state_bytes(RULES[rule], engine.parallel.placement)
    assert optimizer_state_bytes(case_of(shape, "dp=1", RULES[rule]), RULES[rule], 0) == held


def on_a_rank(shape: ModelConfig, layout: str, rule: OptimizerConfig) -> tuple[int, float, int]:
    """(bytes of states, bytes that the update sends, messages)"""
    engine = Engine(models.build(shape, "meta"), layout, rule)
    issued = engine.optimizer.collectives()
    ranks = engine.parallel.policy.num_shards * engine.layout.tp
    sent = sum(wire_bytes(item.op, item.bytes, ranks) for item in issued)
    return cost.rank_state_bytes(rule, engine.parallel.placement), sent, len(issued)


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "tp=2"])
def test_optimizer_state_and_collectives_of_ranks(pool: RankPool, layout: str) -> None:
    shape = SHAPES["llama"]
    for name in ("int8", "lamb", "adafactor", "sm3", "muon"):
        rule = RULES[name]
        found = pool.run(on_a_rank, 2, shape, layout, rule)
        case = case_of(shape, layout, rule, "2xcpu")
        planned = update_comm(case, rule)
        held, sent, messages = (sum(numbers) / 2 for numbers in zip(*found, strict=True))
        print(
            f"{name}, {layout}: {held:,.0f} held, {optimizer_state_bytes(case, rule, 0):,} planned; {sent:,.0f} sent, "
            f"{planned.wire_bytes:,.0f} planned"
        )
        # Norms lie whole on every rank of tp, but for the last one's, which is taken to be divided.
        assert optimizer_state_bytes(case, rule, 0) == pytest.approx(held, rel=0.01)
        assert planned.num_collectives == messages
        assert planned.wire_bytes == pytest.approx(sent, rel=0.01)


def test_update_in_backward_frees_gradients() -> None:
    shape, one = resolve_shape("llama-1b"), Layout.parse("dp=1,recompute=full")

    def of(rule: OptimizerConfig, layout: Layout = one) -> dict[str, int]:
        case = Scenario(
            shape=shape, cluster=cluster.parse_cluster("1xh200"), layout=layout, seq_len=512, optimizer=rule
        )
        return stage_memory(case, 0).parts

    every, some = of(OptimizerConfig()), of(OptimizerConfig(in_backward=True))
    assert some["gradients"] < 0.5 * every["gradients"]
    more = Layout.parse("dp=1,accumulate=2,recompute=full")
    assert of(OptimizerConfig(in_backward=True), more)["gradients"] == of(OptimizerConfig(), more)["gradients"]


def test_muon_is_slower_and_leaner_than_adamw() -> None:
    def of(rule: OptimizerConfig) -> tuple[int, float]:
        case = Scenario(
            shape=resolve_shape("llama-8b"),
            cluster=cluster.parse_cluster("8xh100"),
            layout=Layout.parse("dp=8,zero=1"),
            seq_len=4096,
            optimizer=rule,
        )
        return state_bytes_by_category(case, 0)["optimizer"], price(case).times["update"]

    adamw, muon = of(OptimizerConfig()), of(OptimizerConfig(name="muon"))
    assert muon[0] < 0.6 * adamw[0]
    assert adamw[1] < muon[1]


@pytest.mark.parametrize(
    ("tied", "layout", "has_head"), [(True, "dp=1", False), (True, "pp=2", True), (False, "dp=1", True)]
)
def test_the_last_stage_of_tied_weights_has_states_of_its_own_copy(tied: bool, layout: str, has_head: bool) -> None:
    case = case_of(tiny("llama", tied=tied), layout, OptimizerConfig(), devices="2xcpu")
    names = {matrix.name for matrix in param_matrices(case, case.layout.pp - 1)}
    assert ("head.weight" in names) is has_head
