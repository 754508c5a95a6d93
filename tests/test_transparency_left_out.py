"""With one reduction left out `verify` fails, and names a parameter that depends on it and the axis it runs over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.parallel.dp import sync_batchnorm
from echelon.parallel.partial_gradients import PartialGradients
from echelon.training import grad_norm
from echelon.verification import verifier
from echelon.verification.compare import RankReport, run_and_compare
from echelon.verification.verifier import LayoutVerdict, Verifier
from echelon.verification.verify_case import VerifyCase

SMALL = {"layers": 1, "width": 32, "ffn": 48, "max_seq_len": 64}
GPT = replace(model_config.find_model("gpt-tiny"), **SMALL)
LLAMA = replace(model_config.find_model("llama-tiny"), **SMALL)
CONV = model_config.find_model("conv-tiny")
CLIP = 0.1
"""small enough to bind: a wrong norm then makes every update wrong, which must not hide the parameter at fault"""


def judge(pool: RankPool, layout: str, leave_out: str = "", model: ModelConfig = LLAMA) -> LayoutVerdict:
    prover = Verifier(pool, VerifyCase(model=model, steps=2, clip=CLIP), leave_out)
    return prover.verify_layout(Layout.parse(layout))


def named(verdict: LayoutVerdict) -> str:
    """The parameter that a failed verdict names, or "loss" or "norm"; it is also what `--json` says."""
    assert not verdict.passed
    assert not verdict.trouble
    assert verdict.first_difference is not None
    name = verdict.first_difference.name or verdict.first_difference.kind
    shown = verdict.to_json()["first_difference"]
    assert (shown["parameter"], shown["axis"]) == (name, verdict.axis)
    return name


# Every parameter's gradient is summed over these, so the first of the model is the one to name.
EVERY_GRADIENT = [
    ("dp=2", "replica:all_reduce", "dp"),
    ("dp=3,accumulate=2", "replica:all_reduce", "dp"),
    ("dp=2,zero=1", "shard:reduce_scatter", "dp"),
    ("dp=2,zero=2,accumulate=2", "shard:reduce_scatter", "dp"),
    ("dp=2,zero=3", "shard:reduce_scatter", "dp"),
    ("dp=2,zero=1", "shard:all_gather", "dp"),
    ("dp=2,zero=2", "shard:all_gather", "dp"),
    ("dp=2,zero=3", "shard:all_gather", "dp"),
    ("dp=4,shard=2", "replica:all_reduce", "replica"),
    ("dp=4,shard=2,zero=1", "replica:all_reduce", "replica"),
    ("dp=4,shard=2", "shard:reduce_scatter", "shard"),
    ("dp=4,shard=2,zero=1", "shard:all_gather", "shard"),
    ("tp=2,sp=0", "tp:all_reduce", "tp"),
    ("tp=2,sp=1", "tp:reduce_scatter", "tp"),
    ("tp=2,sp=1", "tp:all_gather", "tp"),
    ("dp=2", "dp:all_reduce", "dp"),
    # Of two axes, the one that is whole is not blamed.
    ("dp=2,tp=2", "replica:all_reduce", "dp"),
    ("dp=2,tp=2,sp=0", "tp:all_reduce", "tp"),
    ("dp=2,tp=2,zero=1", "shard:reduce_scatter", "dp"),
    ("dp=2,tp=2,zero=3", "shard:all_gather", "dp"),
    ("dp=2,tp=2,zero=3", "tp:reduce_scatter", "tp"),
    ("dp=2,tp=2,zero=2,sp=0", "tp:all_reduce", "tp"),
    ("dp=2,tp=2", "dp:all_reduce", "dp"),
]


@pytest.mark.parametrize(("layout", "leave_out", "axis"), EVERY_GRADIENT)
def test_verify_detects_a_missing_gradient_reduction(pool: RankPool, layout: str, leave_out: str, axis: str) -> None:
    verdict = judge(pool, layout, leave_out)
    assert named(verdict) == "embed.weight"
    assert verdict.axis == axis
    assert verdict.first_difference is not None
    assert (verdict.first_difference.step, verdict.first_difference.kind) == (0, "gradient")
    assert verdict.max_error > 1e-6


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3", "tp=2", "tp=2,sp=0", "dp=2,tp=2,zero=1"])
def test_a_collective_dropped_on_another_axis_changes_nothing(pool: RankPool, layout: str) -> None:
    for elsewhere in ("tp/2:all_reduce",):
        assert judge(pool, layout, elsewhere).passed


@pytest.mark.parametrize("layout", ["tp=4", "tp=4,sp=0", "dp=2,tp=4,zero=1"])
def test_replicated_kv_heads_name_a_key_or_value(pool: RankPool, layout: str) -> None:
    verdict = judge(pool, layout, "tp/2:all_reduce")
    assert named(verdict) in {f"blocks.0.attn.{word}.weight" for word in ("k", "v")}
    assert verdict.axis == "tp"


@pytest.mark.parametrize(
    ("layout", "axis"),
    [("tp=2", "tp"), ("dp=2,zero=1", "dp"), ("dp=4,shard=2", "shard"), ("dp=2,tp=2,zero=2", "tp x dp")],
)
def test_the_norm_is_wrong_where_no_gradient_is(pool: RankPool, layout: str, axis: str) -> None:
    """Clipped by a wrong norm, the first update is wrong everywhere, and no gradient is."""
    verdict = judge(pool, layout, "shard*tp:all_reduce")
    name = named(verdict)
    assert verdict.first_difference is not None
    assert (name, verdict.first_difference.kind) == ("embed.weight", "parameter")
    assert verdict.axis == axis


def test_without_clipping_a_wrong_norm_is_named_itself(pool: RankPool) -> None:
    prover = Verifier(pool, VerifyCase(model=LLAMA, steps=2, clip=0.0), "shard*tp:all_reduce")
    assert named(prover.verify_layout(Layout.parse("tp=2"))) == "norm"


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,tp=2", "dp=2,tp=2,zero=3"])
def test_under_sequence_parallelism_only_partial_gradients_are_all_reduced(pool: RankPool, layout: str) -> None:
    verdict = judge(pool, layout, "tp:all_reduce")
    assert named(verdict) == "blocks.0.norm1.weight"
    assert verdict.axis == "tp"


# -- pipelines --------------------------------------------------------------------------------------------------------

STAGED = replace(LLAMA, layers=2)


@pytest.mark.parametrize(
    ("layout", "leave_out", "model", "name", "kind"),
    [
        # Only the last stage knows the loss and the number of targets: without their sum the others divide by nothing.
        ("pp=2,accumulate=2", "pp*dp:all_reduce", STAGED, "embed.weight", "gradient"),
        ("pp=2,accumulate=2", "pp*shard*tp:all_reduce", STAGED, "embed.weight", "parameter"),
        ("pp=2,accumulate=2", "pp[0+1]:all_reduce", replace(STAGED, tied=True), "embed.weight", "gradient"),
    ],
)
def test_sums_over_stages(
    pool: RankPool, layout: str, leave_out: str, model: ModelConfig, name: str, kind: str
) -> None:
    verdict = judge(pool, layout, leave_out, model)
    assert named(verdict) == name
    assert verdict.first_difference is not None
    assert (verdict.first_difference.step, verdict.first_difference.kind) == (0, kind)
    assert verdict.axis == "pp"


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_a_data_parallel_pipeline_without_its_reduction(pool: RankPool, schedule: str) -> None:
    verdict = judge(pool, f"dp=2,pp=2,accumulate=2,schedule={schedule}", "shard:reduce_scatter", STAGED)
    assert named(verdict) == "embed.weight"
    assert verdict.axis == "dp"


# -- left out inside the code of a rank: what no name of a collective tells apart --------------------------------------


def without_partial_sums(case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    """On a rank: gradients of which each tp rank has a part are not summed."""
    whole = PartialGradients.all_reduce
    PartialGradients.all_reduce = lambda *_: None
    try:
        return run_and_compare(case, layout, leave_out, truth)
    finally:
        PartialGradients.all_reduce = whole


def without_batch_statistics(case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    """On a rank: every BatchNorm takes the statistics of its own rows."""
    whole = sync_batchnorm.convert_sync_batchnorm
    sync_batchnorm.convert_sync_batchnorm = lambda model, axis: 0  # type: ignore[assignment]
    try:
        return run_and_compare(case, layout, leave_out, truth)
    finally:
        sync_batchnorm.convert_sync_batchnorm = whole


def without_running_statistics(case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    """On a rank: no BatchNorm notes the statistics that evaluation reads."""
    whole = sync_batchnorm.SyncBatchNorm._track
    sync_batchnorm.SyncBatchNorm._track = lambda *_: None  # type: ignore[assignment]
    try:
        return run_and_compare(case, layout, leave_out, truth)
    finally:
        sync_batchnorm.SyncBatchNorm._track = whole  # type: ignore[method-assign]


def with_every_copy_counted(case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    """On a rank: the norm counts what it holds, owned or not."""
    whole = grad_norm.gradient_slices
    grad_norm.gradient_slices = lambda parallel, **_: [
        grad_norm.GradientSlice(unit, slice(None), "", True) for unit in parallel.sharded_model.param_groups
    ]
    try:
        return run_and_compare(case, layout, leave_out, truth)
    finally:
        grad_norm.gradient_slices = whole


Broken = Callable[[VerifyCase, str, str, Path], RankReport]


def judge_broken(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, broken: Broken, layout: str, model: ModelConfig
) -> LayoutVerdict:
    monkeypatch.setattr(verifier, "run_and_compare", broken)
    return judge(pool, layout, model=model)


SEQUENCE_PARAMETERS = {
    "gpt": ("norm1", "norm2", "norm", "positions", "o.bias", "down.bias"),
    "llama": ("norm1", "norm2", "norm"),
}


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,tp=2,zero=3"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_partial_gradients_under_sequence_parallelism(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, model: ModelConfig, layout: str
) -> None:
    verdict = judge_broken(pool, monkeypatch, without_partial_sums, layout, model)
    name = named(verdict)
    assert any(f".{word}" in f".{name}" for word in SEQUENCE_PARAMETERS[model.family]), name
    assert verdict.axis == "tp"


def test_without_sequence_parallelism_no_gradient_is_partial(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_broken(pool, monkeypatch, without_partial_sums, "tp=2,sp=0", LLAMA).passed


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_batch_statistics(pool: RankPool, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    assert judge(pool, layout, model=CONV).passed
    verdict = judge_broken(pool, monkeypatch, without_batch_statistics, layout, CONV)
    assert named(verdict) in ("blocks.0.conv.weight", "head.weight")
    assert verdict.axis == "dp"


def test_running_statistics(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss, gradient or weight depends on them: buffers are compared, too."""
    verdict = judge_broken(pool, monkeypatch, without_running_statistics, "dp=2", CONV)
    assert named(verdict) == "blocks.0.norm.running_mean"


def test_batch_statistics_left_out_by_name(pool: RankPool) -> None:
    verdict = judge(pool, "dp=2", "dp:all_reduce", CONV)
    assert named(verdict) in ("blocks.0.conv.weight", "head.weight")
    assert verdict.axis == "dp"


@pytest.mark.parametrize("layout", ["tp=2", "tp=4,sp=0"])
def test_verify_detects_a_norm_that_counts_copies(pool: RankPool, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    verdict = judge_broken(pool, monkeypatch, with_every_copy_counted, layout, LLAMA)
    assert named(verdict) == "embed.weight"
    assert verdict.axis == "tp"
