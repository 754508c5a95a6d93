"""Whatever `plan` marks as runnable, `verify` verifies: the best plans of models on clusters, folded to eight ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.rules import find_issues
from echelon.models import find_model
from echelon.models.model_config import ModelConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline.schedules import make_schedule, schedule_for_layout
from echelon.training.engine import Engine
from echelon.verification import verifier
from echelon.verification.fold_layout import DEFAULT_MAX_RANKS, MAX_MICROBATCHES, MAX_SEQUENCES
from echelon.verification.layout_case import LayoutCase, case_for_layout
from echelon.verification.verify_case import VerifyCase
from echelon.verification.verify_request import VerifyRequest
from tests.verification.test_verifier import batch, build

MODELS = (
    *("gpt2-1.5b", "gpt3-175b", "llama-1b", "llama-3b", "llama-8b", "llama-70b", "llama-405b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"),
)
CLUSTERS = ("8xh100", "24xv100", "64xa100-80:eth", "256xh100", "512xgb200", "1024xh200")
FIXED = (
    ("llama-8b", "64xh100", {"seq_len": 65536, "batch": 16}),
    ("deepseek-v3", "256xh100", {"seq_len": 131072, "batch": 32}),
    ("gpt3-175b", "64xh100", {"fixed": "tp=16,tp_kind=2d"}),
    ("gpt3-175b", "64xh100", {"fixed": "tp=8,tp_kind=3d"}),
    ("llama-8b", "16xh100", {"fixed": "pp=4,schedule=terapipe"}),
    ("llama-8b", "16xh100", {"fixed": "pp=4,schedule=pipedream"}),
    ("llama-8b", "16xh100", {"fixed": "pp=4,schedule=2bw"}),
    ("llama-8b", "16xh100", {"fixed": "recompute=sqrt"}),
    ("llama-8b", "16xh100", {"fixed": "recompute=every:8"}),
    ("llama-70b", "8xh100", {"fixed": "offload=optimizer+params"}),
)
"""what the best plans seldom have"""


def planned_cases(model: str, cluster: str, **options: object) -> Iterator[LayoutCase]:
    """The 20 best plans as they are verified; each must resolve."""
    for plan in ec.plan(model, cluster, top=20, **options):
        assert plan.runnable, plan.layout
        request = VerifyRequest(model=model, layouts=str(plan.layout)).resolve()
        assert request.layouts == (plan.layout,)
        yield case_for_layout(request.case, plan.layout)


def check_case(run: LayoutCase) -> None:
    """The folded layout fits the machine and the reduced model, which is small, and keeps every axis it can."""
    layout, model, asked = run.layout, run.case.model, run.folded.requested
    assert isinstance(model, ModelConfig)
    assert layout.world <= DEFAULT_MAX_RANKS
    assert find_issues(layout, seq_len=run.case.seq_len, model=model) == []
    assert model.parameters < 2_000_000
    assert layout.microbatch <= MAX_SEQUENCES
    assert layout.accumulate <= max(MAX_MICROBATCHES, 2 * layout.pp)
    if layout.pp > 1:
        assert schedule_for_layout(layout).stages <= model.layers
    axes = [axis for axis in ("tp", "cp", "pp", "dp") if getattr(asked, axis) > 1]
    smallest_tp = {"1d": 2, "3d": 8}.get(asked.tp_kind, 4) if asked.tp > 1 else 1
    room = (asked.tp > 1) + (DEFAULT_MAX_RANKS // smallest_tp).bit_length() - 1
    assert [axis for axis in axes if getattr(layout, axis) > 1][:room] == axes[:room], (asked, layout)
    if layout.pp > 1:
        assert (layout.schedule, layout.vpp) == (asked.schedule, asked.vpp)
    assert (layout.zero, layout.tp_kind) == (asked.zero, asked.tp_kind)
    assert (layout.ep > 1, layout.offload) == (asked.ep > 1, asked.offload)
    assert layout.recompute.partition(":")[0] == asked.recompute.partition(":")[0]
    changed = {key for key in asked.explicit | layout.explicit if getattr(asked, key) != getattr(layout, key)}
    assert {part.partition("=")[0] for part in run.folded.changes.split(", ") if part} == changed


@pytest.mark.parametrize(
    ("model", "cluster"), [("gpt2-1.5b", "8xa100-80"), ("llama-3b", "24xv100"), ("qwen3-30b-a3b", "8xh100")]
)
def test_the_best_plans_can_be_verified(model: str, cluster: str) -> None:
    cases = list(planned_cases(model, cluster))
    assert len(cases) == 20
    for run in cases:
        check_case(run)


@pytest.mark.soak
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_best_plans_of_every_model_on_every_cluster_can_be_verified(model: str, cluster: str) -> None:
    for run in planned_cases(model, cluster):
        check_case(run)


@pytest.mark.soak
@pytest.mark.parametrize(("model", "cluster", "options"), FIXED)
def test_the_best_plans_with_seldom_strategies_can_be_verified(
    model: str, cluster: str, options: dict[str, object]
) -> None:
    for run in planned_cases(model, cluster, **options):
        check_case(run)


PLANNED = (
    ("llama-70b", "dp=4,tp=8,pp=2,schedule=zb-v,microbatch=2,accumulate=128"),
    (
        "deepseek-v3",
        "dp=16,pp=16,schedule=dualpipe-v,ep=16,ep_inner=8,microbatch=2,accumulate=128,recompute=budget:15.6GiB",
    ),
    ("llama-405b", "dp=4,zero=3,tp=16,cp=8,microbatch=2,accumulate=64,recompute=ops"),
)
"""plans for 64 and more devices, with different strategies"""


@pytest.mark.parametrize(("model", "layout"), PLANNED, ids=["zb-v", "experts and budget", "tp shares kv heads"])
def test_plans_for_many_devices_compute_what_one_device_computes(pool: RankPool, model: str, layout: str) -> None:
    [verdict] = verifier.verify(model, layout, pool=pool, steps=2).verdicts
    assert verdict.passed, verdict
    assert verdict.layout == str(Layout.parse(layout))
    assert Layout.parse(verdict.ran).world <= DEFAULT_MAX_RANKS
    assert verdict.folded.startswith("dp=")


def test_a_folded_layout_fails_where_a_collective_is_missing(pool: RankPool) -> None:
    [verdict] = verifier.verify("llama-70b", "dp=8,tp=8", pool=pool, steps=1, leave_out="tp:reduce_scatter").verdicts
    assert not verdict.passed
    assert (verdict.axis, verdict.folded) == ("tp", "dp=8 to 2, tp=8 to 4")


def test_a_plan_of_a_custom_model_is_folded_and_runs(pool: RankPool) -> None:
    layout = "dp=64,zero=2,shard=8,microbatch=16"
    report = verifier.verify(build, layout, batch=batch, pool=pool, max_ranks=4, steps=2).to_json()
    [verdict] = report["layouts"]
    assert verdict["passed"], verdict
    assert verdict["ran"] == "dp=4,zero=2,shard=2,microbatch=2"
    assert verdict["folded"] == "dp=64 to 4, shard=8 to 2, microbatch=16 to 2"
    assert verdict["model"].endswith("test_verifier.py:build")


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3", "llama-405b"])
def test_a_reduced_model_of_many_layers_is_small(model: str) -> None:
    """One of 48 chunks has 48 layers: qwen3-30b-a3b had 3.4 million parameters of them."""
    case = VerifyCase(model=find_model(model), reduce=True, max_ranks=8)
    run = case_for_layout(case, Layout.parse("pp=8,schedule=interleaved,vpp=6,microbatch=2,accumulate=16"))
    assert isinstance(run.case.model, ModelConfig)
    assert run.case.model.layers >= 48
    check_case(run)


def test_many_stages_and_microbatches_may_take_longer() -> None:
    """48 stages with 16 microbatches ran out of the 120 s of all others, on two cores that had other work."""
    text = "pp=8,schedule=interleaved,vpp=6,accumulate=16"
    assert verifier.timeout_for(Layout.parse(text)) == 3 * verifier.TIMEOUT
    for usual in ("dp=8,zero=3,accumulate=8", "pp=8,schedule=zb-v,accumulate=16", "pp=4,accumulate=8"):
        assert verifier.timeout_for(Layout.parse(usual)) == verifier.TIMEOUT


def test_a_schedule_file_has_as_many_layers_as_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(str(make_schedule("interleaved", 4, 12, chunks=3)))
    text = f"dp=16,pp=4,schedule=file:{path},accumulate=12"
    request = VerifyRequest(model="llama-70b", layouts=text).resolve()
    run = case_for_layout(request.case, request.layouts[0])
    assert isinstance(run.case.model, ModelConfig)
    assert (run.case.model.layers, run.folded.changes) == (12, "dp=16 to 2")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "cluster"),
    [(model, cluster) for i, model in enumerate(MODELS) for cluster in (CLUSTERS[i % 6], CLUSTERS[(i + 3) % 6])],
)
def test_the_best_plans_compute_what_one_device_computes(pool: RankPool, model: str, cluster: str) -> None:
    """Each folded form once: many plans differ in their degrees alone."""
    plans = {str(replace(run.layout, accumulate=1)): run for run in planned_cases(model, cluster)}
    for run in plans.values():
        [verdict] = verifier.verify(model, str(run.folded.requested), pool=pool, steps=2).verdicts
        assert verdict.passed, verdict


# -- recompute policies of the full model, for the reduced one -------------------------------------------------------


def planned_engine(case: VerifyCase, layout: str) -> Engine:
    """On one rank, after the first step."""
    run = case_for_layout(case, Layout.parse(layout))
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64, seed=1)
    engine = Engine(run.case.build("meta"), run.layout, run.case.optimizer, options=options)
    engine.step(run.case.batch(0, run.layout.batch))
    return engine


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama-8b", "deepseek-v3", "qwen3-30b-a3b", "switch-base-8"])
def test_a_budget_is_reduced_so_that_some_layers_are_recomputed(name: str, dropout: float) -> None:
    case = VerifyCase(model=replace(find_model(name), dropout=dropout), reduce=True, max_ranks=2)
    engine = planned_engine(case, "microbatch=2,recompute=budget:15.6GiB")
    forms = {option.form for option in engine.parallel.checkpointing.chosen}  # type: ignore[attr-defined]
    assert "full" in forms
    assert len(forms) > 1


def test_a_recomputed_segment_is_reduced_with_the_layers() -> None:
    case = VerifyCase(model=find_model("llama-70b"), reduce=True, max_ranks=8)
    run = case_for_layout(case, Layout.parse("pp=2,recompute=every:20"))
    assert isinstance(run.case.model, ModelConfig)
    assert (run.case.model.layers, run.layout.recompute) == (6, "every:2")
    assert run.folded.changes == "recompute=every:20 to every:2"
    assert case_for_layout(case, Layout.parse("recompute=every:3")).folded.changes == ""
