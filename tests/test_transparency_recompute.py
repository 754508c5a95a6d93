"""Every way to recompute, on layouts: equal to one device, and with the messages that they claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from collective_cost_check import check, check_together
from tiny_engines import SGD, batch_of, float64, largest_error, tiny, whole

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.verification.verifier import Verifier
from echelon.verification.verify_case import VerifyCase

LLAMA = replace(
    model_config.find_model("llama-tiny"), layers=4, width=32, heads=4, kv_heads=4, ffn=48, max_seq_len=64, dropout=0.1
)
GPT = replace(model_config.find_model("gpt-tiny"), layers=4, width=32, ffn=48, max_seq_len=64, dropout=0.1)
MOE = replace(model_config.find_model("moe-tiny"), layers=4, width=32, max_seq_len=64, dropout=0.1)

LAYOUTS = [
    (LLAMA, "tp=2,recompute=every:3"),
    (GPT, "tp=2,sp=0,recompute=sqrt"),
    (LLAMA, "tp=2,sp=0,recompute=selective"),
    (GPT, "dp=2,zero=3,accumulate=2,recompute=every:2"),
    (LLAMA, "dp=2,zero=3,recompute=budget:0.0004GiB"),
    (LLAMA, "pp=2,accumulate=3,recompute=every:2"),
    (LLAMA, "dp=2,pp=2,accumulate=2,schedule=zb-v,zero=3,recompute=sqrt"),
    (replace(GPT, layers=6), "pp=2,accumulate=3,schedule=interleaved,recompute=selective"),
    (LLAMA, "pp=2,accumulate=2,schedule=zb-h1,recompute=budget:0.0005GiB"),
    (LLAMA, "pp=2,schedule=terapipe,recompute=every:2"),
    (LLAMA, "cp=2,recompute=selective"),
    (LLAMA, "cp=2,cp_kind=ulysses,recompute=every:2"),
    (LLAMA, "tp=4,tp_kind=2d,recompute=every:2"),
    (MOE, "dp=2,ep=2,recompute=every:2"),
    (MOE, "dp=2,ep=2,zero=3,recompute=budget:0.0005GiB"),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda value: getattr(value, "name", value))
def test_a_layout_equals_one_device(pool: RankPool, model: ModelConfig, layout: str) -> None:
    verdict = Verifier(pool, VerifyCase(model=model, steps=2, seq_len=17)).verify_layout(Layout.parse(layout))
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


COUNTED = [
    (LLAMA, "tp=2,microbatch=2,recompute=every:3"),
    (replace(LLAMA, dropout=0.0), "tp=2,sp=0,accumulate=2,recompute=every:2"),
    (replace(LLAMA, dropout=0.0), "tp=2,recompute=budget:0.0009GiB"),
    (GPT, "tp=2,recompute=selective"),
    (GPT, "dp=2,tp=2,zero=3,recompute=every:3"),
    (GPT, "dp=2,pp=2,zero=3,accumulate=2,recompute=every:2"),
    (LLAMA, "cp=2,recompute=selective"),
    (LLAMA, "cp=2,cp_kind=ulysses,recompute=selective"),
    (LLAMA, "cp=2,cp_kind=gather,recompute=every:2"),
    (LLAMA, "tp=4,tp_kind=2d,recompute=every:2"),
]


@pytest.mark.parametrize(("model", "layout"), COUNTED, ids=lambda value: getattr(value, "name", value))
def test_a_layout_issues_the_counted_collectives(pool: RankPool, model: ModelConfig, layout: str) -> None:
    check(pool, model, layout)


def test_experts_issue_the_counted_collectives(pool: RankPool) -> None:
    check_together(pool, replace(MOE, dropout=0.0), "dp=2,ep=2,recompute=every:2")
    one = replace(MOE, dropout=0.0, moe=MoEConfig(experts=8, k=1, ffn=16, gate="mixtral"))
    check_together(pool, one, "dp=4,ep=4,ep_inner=2,recompute=every:3")


def stepped(shape: ModelConfig, layout: str, **options: Any) -> dict[str, torch.Tensor]:
    """On a rank: gradients of a step, put together."""
    model = models.build(shape, "meta", dtype=torch.float64)
    engine = Engine(model, layout, SGD, options=float64(**options))
    engine.model.train()
    engine.step(batch_of(shape, 4))
    return whole(engine.parallel)


@pytest.mark.parametrize("recompute", ["full", "every:2", "budget:0.0001GiB"])
def test_inputs_in_slices_and_in_an_arena_change_nothing(pool: RankPool, recompute: str) -> None:
    shape = tiny("gpt", layers=3, dropout=0.1, kv_heads=4)
    layout = "tp=2,sp=0,microbatch=2,accumulate=2,recompute="
    expected = pool.run(stepped, 2, shape, layout + "none")[0]
    for found in pool.run(stepped, 2, shape, layout + recompute, partition=True, arena=True):
        assert largest_error(found, expected) < 1e-12


@pytest.mark.parametrize("recompute", ["full", "every:2"])
def test_slices_are_gathered_as_counted(pool: RankPool, recompute: str) -> None:
    check(pool, GPT, f"tp=2,sp=0,microbatch=2,accumulate=2,recompute={recompute}", partition=True)


def kept_inputs(layout: str, **options: Any) -> int:
    """On a rank: bytes that forward leaves for backward."""
    engine = Engine(models.build(GPT, "meta"), layout, SGD, options=ParallelOptions(**options))
    engine.model.train()
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.model(**engine.prepare(next(engine.microbatches(batch_of(GPT, 2, 64)))))
    return sum(found.values())


def test_slices_save_all_but_one_part_of_the_inputs(pool: RankPool) -> None:
    layout = "tp=4,sp=0,microbatch=2,recompute=full"
    before, after = (pool.run(kept_inputs, 4, layout, partition=on) for on in (False, True))
    inputs = GPT.layers * 2 * 64 * GPT.width * 4
    assert [one - other for one, other in zip(before, after, strict=True)] == [3 * inputs // 4] * 4


# -- buffers of a constant size ---------------------------------------------------------------------------------------


def gathered(layout: str, **options: Any) -> tuple[dict[str, torch.Tensor], int, int]:
    """On a rank: gradients of a step, bytes of parameters that were whole at once, and of the largest unit."""
    model = models.build(LLAMA, "meta", dtype=torch.float64)
    engine = Engine(model, layout, SGD, options=float64(**options))
    engine.model.train()
    layers = [unit for unit in engine.parallel.sharded_model.param_groups if not unit.spec.stays_unsharded]
    most = 0
    for unit in layers:

        def gather(inner: Any = unit.unshard) -> None:
            nonlocal most
            inner()
            most = max(most, sum(other.unsharded_param.untyped_storage().nbytes() for other in layers))

        unit.unshard = gather  # type: ignore[method-assign]
    engine.step(batch_of(LLAMA, 4))
    return whole(engine.parallel), most, max(unit.unsharded_param.numel() * 8 for unit in layers)


@pytest.mark.parametrize("recompute", ["none", "full", "every:2"])
def test_param_groups_are_split_to_a_constant_size(pool: RankPool, recompute: str) -> None:
    layout = f"dp=2,zero=3,microbatch=2,recompute={recompute}"
    expected, before, largest = pool.run(gathered, 2, layout, prefetch=0)[0]
    limit = LLAMA.width * LLAMA.ffn * 8
    assert largest > 5 * limit
    for found, most, each in pool.run(gathered, 2, layout, prefetch=0, max_group_bytes=limit):
        assert largest_error(found, expected) < 1e-12
        assert each <= limit
        assert most <= 2 * limit < before


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_param_groups_are_gathered_as_counted(pool: RankPool, recompute: str) -> None:
    layout, limit = f"dp=2,zero=3,accumulate=2,recompute={recompute}", LLAMA.width * LLAMA.ffn * 4
    check(pool, LLAMA, layout, max_group_bytes=limit)
    check(pool, replace(GPT, dropout=0.0), layout, max_group_bytes=limit)
