"""Plans of LoRA: the adapters alone have gradients and states, and frozen weights no weight-gradient GEMMs."""

from __future__ import annotations

from typing import Any

import pytest

from echelon import models
from echelon.layout import ValidationError
from echelon.models.lora.add_lora import adaptable_linears
from echelon.planning.model.adapter_shapes import adapter_shapes
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.planner import find_plans
from echelon.planning.priced_plan import Plan

ADAPTERS = 32 * 16 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 2 * (4096 + 14336) + 4096 + 14336)
"""of rank 16 beside the seven linears of each of 32 layers"""


def plan(layout: str, rank: int = 16, *targets: str) -> Plan:
    options: dict[str, Any] = {"batch": 64, "seq_len": 4096, "layout": layout}
    return find_plans("llama-8b", "8xh100", **options, lora_rank=rank, lora_targets=targets).plans[0]


def test_the_adapters_alone_have_gradients_and_states() -> None:
    parts = plan("dp=8,microbatch=1").memory.parts
    assert parts["parameters"] == pytest.approx(2 * (8.03e9 + ADAPTERS), rel=1e-3)
    assert parts["optimizer"] == pytest.approx(8 * ADAPTERS, rel=1e-3)
    assert parts["gradients"] == pytest.approx(4 * ADAPTERS, rel=1e-3)
    assert parts["master"] == pytest.approx(2 * ADAPTERS, rel=1e-3)


def test_zero_3_shards_the_frozen_weights_and_zero_2_does_not() -> None:
    kept, sharded = (plan(f"dp=8,zero={zero},microbatch=1").memory.parts for zero in (2, 3))
    assert kept["parameters"] == pytest.approx(2 * 8.03e9, rel=0.01)
    assert sharded.get("parameters", 0) == 0
    assert sharded["master"] == pytest.approx((2 * 8.03e9 + 4 * ADAPTERS) / 8, rel=1e-3)


def test_a_frozen_weight_has_no_gradient_gemm() -> None:
    frozen, trained = plan("dp=8,microbatch=1"), plan("dp=8,zero=2,microbatch=1", rank=0)
    assert 0.66 < frozen.times["products"] / trained.times["products"] < 0.75
    assert frozen.times["attention"] == pytest.approx(trained.times["attention"])
    assert frozen.times["dp"] < 0.1 * trained.times["dp"]
    assert frozen.times["update"] < 0.1 * trained.times["update"]


def test_adapters_cost_more_with_their_rank() -> None:
    assert plan("dp=8,microbatch=1", rank=256).seconds > plan("dp=8,microbatch=1", rank=8).seconds


ATTENTION_Q_V = 32 * 16 * (2 * 4096 + 4096 + 1024)
MLP = 32 * 16 * 3 * (4096 + 14336)


@pytest.mark.parametrize(
    ("targets", "adapters"),
    [
        (("q,v",), ATTENTION_Q_V),
        (("mlp.*",), MLP),
        (("*.attn.q", "attn.v", "blocks.*.mlp.*"), ATTENTION_Q_V + MLP),
        (("blocks.3.mlp.*", "blocks.4.mlp.*"), MLP / 16),
        (("attn.*", "mlp.*"), ADAPTERS),
    ],
)
def test_only_the_adapters_that_targets_name_are_priced(targets: tuple[str, ...], adapters: float) -> None:
    named, every = plan("dp=8,microbatch=1", 16, *targets), plan("dp=8,microbatch=1")
    assert named.memory.parts["optimizer"] == pytest.approx(8 * adapters, rel=1e-3)
    assert named.memory.parts["gradients"] == pytest.approx(4 * adapters, rel=1e-3)
    if adapters < ADAPTERS:
        assert named.times["products"] < every.times["products"]


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"lora.targets=q_proj matches no linear in the layers.*attn\.q"
    ) as caught:
        plan("dp=8,microbatch=1", 16, "q_proj", "mlp.up")
    assert len(caught.value.issues) == 1


def test_names_of_our_models_linears_are_those_of_plans() -> None:
    for name in ("llama-tiny", "gpt-tiny", "moe-tiny", "deepseek-v2"):
        shape = resolve_shape(name)
        planned = {adapter.name for layer, _ in shape.layers for adapter in adapter_shapes(shape, layer)}
        linears = adaptable_linears(models.build(models.find_model(name), "meta"))
        built = {linear.split(".", 2)[2].replace("shared.", "") for linear in linears if linear.startswith("blocks.")}
        assert planned == built, name
