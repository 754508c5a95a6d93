"""What plans say of recomputation is what a step does: bytes kept and bytes at the fullest moment, of every kind."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
from live_tensor_bytes import LivingBytes
from tiny_engines import SGD, batch_of, tiny

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.memory.checkpointing.cost import GIB
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.planning.cluster import cluster
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.cost.recompute_cost import recompute_plan, recompute_shares, saved_layer_bytes
from echelon.planning.model.model_sources import config_shape
from echelon.planning.scenario import Scenario
from echelon.training.engine import Engine
from echelon.training.logging.metrics import recompute_shares as engine_recompute_shares

ROWS, LENGTH, LAYERS = 2, 64, 8
SIZES: dict[str, Any] = {"layers": LAYERS, "width": 64, "heads": 4, "ffn": 160, "max_seq_len": LENGTH}
LATENT = MLAConfig(query_rank=24, kv_rank=16, rope_dim=8, nope_dim=16, value_dim=16)
MIXTURE = MoEConfig(experts=4, k=2, ffn=64, gate="mixtral")
SHAPES = {
    "llama": tiny(**SIZES),
    "gpt": tiny("gpt", **SIZES, kv_heads=4),
    "llama, dropout": tiny(**SIZES, dropout=0.1),
    "gpt, dropout": tiny("gpt", **SIZES, kv_heads=4, dropout=0.1),
    "head norms": tiny(**SIZES, qk_norm=True),
    "latent": tiny(**SIZES, kv_heads=4, mla=LATENT),
    "mixture": tiny(**SIZES, moe=MIXTURE),
}
KINDS = ("none", "ops", "selective", "full", "every:2", "every:4", "sqrt")


def case_of(shape: ModelConfig, recompute: str, **options: Any) -> Scenario:
    layout = Layout(microbatch=ROWS, recompute=recompute)
    return Scenario(
        shape=config_shape(shape),
        cluster=cluster.parse_cluster("1xcpu"),
        layout=layout,
        seq_len=LENGTH,
        precision="fp32",
        imbalance=1.0,
        **options,
    )


def kept_by_plan(case: Scenario) -> float:
    return sum(n * saved_layer_bytes(case, layer, recompute_plan(case)) for layer, n in case.shape.layers)


def engine_of(shape: ModelConfig, recompute: str) -> Engine:
    engine = Engine(models.build(shape, "meta"), Layout(microbatch=ROWS, recompute=recompute), SGD)
    engine.model.train()
    engine.step(batch_of(shape, ROWS, LENGTH))
    return engine


def after_forward(shape: ModelConfig, recompute: str) -> int:
    """Bytes that are alive when forward is through."""
    engine = engine_of(shape, recompute)
    given = engine.prepare(next(engine.microbatches(batch_of(shape, ROWS, LENGTH))))
    with LivingBytes() as seen:
        out = engine.model(**given)
        gc.collect()
        found = seen.now
    del out
    return found


def kept_by_layers(shape: ModelConfig, recompute: str) -> int:
    """The same without embedding and head: two sizes tell them from the layers."""
    return 2 * (after_forward(shape, recompute) - after_forward(replace(shape, layers=LAYERS // 2), recompute))


def fullest(shape: ModelConfig, recompute: str) -> int:
    engine = engine_of(shape, recompute)
    with LivingBytes() as seen:
        engine.step(batch_of(shape, ROWS, LENGTH))
    return seen.peak


@pytest.mark.parametrize("kind", ["none", "ops", "selective", "full", "every:2", "every:4"])
@pytest.mark.parametrize("name", SHAPES)
def test_layers_save_what_a_plan_predicts(name: str, kind: str) -> None:
    shape = SHAPES[name]
    if name == "mixture" and kind not in ("none", "ops", "selective"):
        pytest.skip("what a gate notes of its loads until the step's end is as much as the inputs of so small a model")
    found, planned = kept_by_layers(shape, kind), kept_by_plan(case_of(shape, kind))
    print(f"{name}, {kind}: {found:,} kept, {planned:,.0f} planned ({planned / found - 1:+.1%})")
    assert planned == pytest.approx(found, rel=0.05)


def test_a_budget_is_solved_as_in_a_run() -> None:
    """The same solver, on bytes that are counted by a run and by a plan."""
    shape = SHAPES["gpt"]
    for share in (0.4, 0.8):
        budget = f"budget:{share * kept_by_plan(case_of(shape, 'none')) / GIB:.9f}GiB"
        chosen = engine_of(shape, budget).parallel.checkpointing
        assert isinstance(chosen, MemoryBudget)
        forms = [way.form for way in chosen.chosen]
        case = case_of(shape, budget)
        planned = {form: round(n * LAYERS) for form, n in recompute_plan(case).forms}
        print(share, planned, chosen.describe())
        assert sum(abs(planned.get(form, 0) - forms.count(form)) for form in {*planned, *forms}) <= 2
        assert kept_by_plan(case) == pytest.approx(sum(way.saved_bytes for way in chosen.chosen), rel=0.05)
        assert recompute_shares(case).layers == pytest.approx(chosen.recompute_work.forward, abs=1 / LAYERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("latent", "mixture")])
def test_peak_memory_of_a_step_is_predicted(name: str, kind: str) -> None:
    shape = SHAPES[name]
    found = fullest(shape, kind)
    parts = stage_memory(case_of(shape, kind), 0).parts
    planned = sum(parts.get(part, 0) for part in ("activations", "logits", "working"))
    print(f"{name}, {kind}: {found:,} at the fullest, {planned:,} planned ({planned / found - 1:+.1%}) {parts}")
    assert planned == pytest.approx(found, rel=0.05)


def on_a_rank(shape: ModelConfig, layout: str) -> int:
    """Bytes that the layers keep of a microbatch."""
    found = []
    for layers in (LAYERS, LAYERS // 2):
        smaller = replace(shape, layers=layers)
        engine = Engine(models.build(smaller, "meta"), Layout.parse(layout), SGD)
        engine.model.train()
        batch = batch_of(smaller, ROWS, LENGTH)
        engine.step(batch)
        given = engine.prepare(next(engine.microbatches(batch)))
        with LivingBytes() as seen:
            out = engine.model(**given)
            found.append(seen.after_collectives())
        del out
    return 2 * (found[0] - found[1])


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt", 4)])
def test_tp_ranks_save_what_a_plan_predicts(pool: RankPool, name: str, tp: int) -> None:
    """Under sequence parallelism what is gathered at the beginning of a region is kept whole."""
    shape = SHAPES[name]
    for keys in ("", ",recompute=ops", ",recompute=selective", ",recompute=full", ",sp=0", ",sp=0,recompute=ops"):
        layout = f"tp={tp},microbatch={ROWS}{keys}"
        found = pool.run(on_a_rank, tp, shape, layout)[0]
        planned = kept_by_plan(replace(case_of(shape, "none"), layout=Layout.parse(layout)))
        print(f"{name}, {layout}: {found:,} kept, {planned:,.0f} planned ({planned / found - 1:+.1%})")
        assert planned == pytest.approx(found, rel=0.05), layout


@pytest.mark.parametrize("name", ["llama", "gpt, dropout"])
def test_a_run_and_a_plan_count_the_same_recomputed_flops(name: str) -> None:
    """So HFU is the same share above MFU in both."""
    shape = SHAPES[name]
    for kind in KINDS:
        planned, counted = recompute_shares(case_of(shape, kind)), engine_recompute_shares(engine_of(shape, kind))
        assert (planned.layers, planned.attention) == (counted.forward, counted.attention), kind
