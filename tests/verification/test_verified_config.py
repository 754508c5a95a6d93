"""`verify` runs what was asked, and says what it could not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.run_config import Config
from echelon.config.sections import LRScheduleConfig, OptimizerConfig, PipelineConfig, PrecisionConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.verification.compare import run_and_compare
from echelon.verification.truth import write_truth
from echelon.verification.verified_config import fitted_config, float64_config
from echelon.verification.verifier import RELATIVE_TOLERANCE, Verifier, verify
from echelon.verification.verify_case import VerifyCase
from echelon.verification.verify_request import VerifyRequest, configure_case

GPT = replace(
    model_config.find_model("gpt-tiny"), layers=1, width=16, heads=2, kv_heads=2, ffn=24, max_seq_len=40, dropout=0.1
)
MOE = replace(model_config.find_model("moe-tiny"), layers=1, width=16, heads=2, kv_heads=2)
RULES = {
    name: OptimizerConfig(name=name, lr=1e-2, ema=0.9)  # type: ignore[arg-type]
    for name in ("adamw", "sgd", "lion", "lamb", "adafactor", "sm3", "muon")
}
LOW_PRECISION = Config(
    dtype="bfloat16",
    compress="lossless+int8",
    precision=PrecisionConfig(reduce="bfloat16", keep_fp32=("*norm*",)),
    optimizer=OptimizerConfig(states="int8", ema=0.99, groups=("embed*:lr=0.5", "blocks.31.*:lr=0.1")),
)
"""of a large model"""


@pytest.mark.parametrize("model", [GPT, MOE], ids=lambda model: model.name)
@pytest.mark.parametrize("name", RULES)
def test_every_optimizer_is_compared_by_its_own_rule(
    pool: RankPool, name: str, model: model_config.ModelConfig
) -> None:
    verdict = Verifier(pool, VerifyCase(model=model, optimizer=RULES[name], steps=3)).verify_layout(
        Layout.parse("dp=2,tp=2,zero=1,accumulate=2")
    )
    assert verdict.passed, verdict
    assert verdict.max_relative < RELATIVE_TOLERANCE / 100


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_rules_of_whole_matrices_count_replicated_kv_heads_once(pool: RankPool, name: str) -> None:
    """Two ranks hold each kv head: its norm, sums and matrix are those of one."""
    model = replace(model_config.find_model("llama-tiny"), layers=1, width=32, heads=4, kv_heads=2, ffn=48)
    case = VerifyCase(model=model, optimizer=RULES[name], steps=2)
    verdict = Verifier(pool, case).verify_layout(Layout.parse("tp=4"))
    assert verdict.passed, verdict


CHANGES = {
    "adamw": {"betas": (0.9, 0.96)},
    "sgd": {"momentum": 0.01},
    "lion": {"betas": (0.9, 0.98)},
    "lamb": {"betas": (0.91, 0.999)},
    "adafactor": {"momentum": 0.01},
    "sm3": {"momentum": 0.01},
    "muon": {"momentum": 0.94},
}


# Only these rules see the size of gradients.
PAIRS = [(name, change) for name in CHANGES for change in ("rule", "weight_decay", "ema", "lr", "groups")]
PAIRS += [(name, "clip") for name in ("adamw", "sgd")]


@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_a_run_with_another_setting_fails(pool: RankPool, tmp_path: Path, name: str, change: str) -> None:
    """Each setting reaches the run and the truth: a run with another value differs from it."""
    case = VerifyCase(model=GPT, optimizer=RULES[name], steps=3, clip=0.01)
    changed = {
        "rule": {"optimizer": replace(RULES[name], **CHANGES[name])},
        "weight_decay": {"optimizer": replace(RULES[name], weight_decay=0.11)},
        "ema": {"optimizer": replace(RULES[name], ema=0.91)},
        "lr": {"config": Config(dtype="float64", schedule=LRScheduleConfig(warmup=1))},
        "clip": {"clip": 0.02},
        "groups": {"optimizer": replace(RULES[name], groups=("*norm*:weight_decay=0.2",))},
    }[change]
    path = tmp_path / "truth.safetensors"
    pool.run(write_truth, 1, case, 4, 1, path)
    (same,) = pool.run(run_and_compare, 1, case, "dp=1,microbatch=4", "", path)
    assert max(difference.relative for difference in same.differences) < RELATIVE_TOLERANCE
    (report,) = pool.run(run_and_compare, 1, replace(case, **changed), "dp=1,microbatch=4", "", path)  # type: ignore[arg-type]
    wrong = {difference.kind for difference in report.differences if difference.relative > RELATIVE_TOLERANCE}
    assert ("average" if change == "ema" else "parameter") in wrong


def test_only_rounding_is_replaced_and_named() -> None:
    runs, replaced = float64_config(LOW_PRECISION)
    assert {str(each) for each in replaced} == {
        "dtype=bfloat16 by float64",
        "precision.reduce=bfloat16 by float64",
        "precision.keep_fp32=*norm* by float64",
        "optimizer.states=int8 by float64",
        "compress=lossless+int8 by lossless",
    }
    assert runs.optimizer == replace(LOW_PRECISION.optimizer, states="float32")
    assert (runs.dtype, runs.compress, runs.precision) == ("float64", "lossless", PrecisionConfig(loss_scale="none"))


def test_what_a_shrunken_model_lacks_is_replaced_and_named() -> None:
    pipeline = PipelineConfig(layers=(16, 16), slices=(64, 64))
    runs, replaced = fitted_config(replace(LOW_PRECISION, pipeline=pipeline), layers=4, stages=2, seq_len=33)
    assert {str(each) for each in replaced} == {
        "optimizer.groups=embed*:lr=0.5,blocks.31.*:lr=0.1 by embed*:lr=0.5",
        "pipeline.layers=16,16 by an automatic choice",
        "pipeline.slices=64,64 by an automatic choice",
    }
    assert runs.optimizer.groups == ("embed*:lr=0.5",)
    pipeline = PipelineConfig(layers=(3, 1), slices=(20, 13))
    fits = replace(Config(), pipeline=pipeline)
    assert fitted_config(fits, layers=4, stages=2, seq_len=33) == (fits, ())


def test_patterns_of_late_layers_are_replaced_also_with_wildcards() -> None:
    kept = ("*.blocks.[0-3].*", "blocks.?.attn.*", "*.w1.*", "head*")
    asked = replace(Config(), precision=PrecisionConfig(keep_fp32=(*kept, "*.blocks.3[01].*", "blocks.31.*")))
    runs, (replacement,) = fitted_config(asked, layers=4, stages=2, seq_len=33)
    assert runs.precision.keep_fp32 == kept
    assert replacement.reason == "it is for the model's full size"


def test_a_configuration_is_verified_with_its_own_microbatches() -> None:
    request = VerifyRequest(settings=["layout=pp=2,microbatch=4", "batch=64"]).resolve()
    assert [str(layout) for layout in request.layouts] == ["dp=1,pp=2,microbatch=4,accumulate=16"]


def test_a_loss_scale_is_an_identity(pool: RankPool) -> None:
    config = Config(dtype="float16", optimizer=OptimizerConfig(lr=1e-2))
    case, _ = configure_case(VerifyCase(model=GPT, steps=3), config)
    assert (case.config.dtype, case.config.loss_scaling) == ("float64", "dynamic")
    assert Verifier(pool, case).verify_layout(Layout.parse("dp=2")).passed


def test_the_asked_options_run(pool: RankPool) -> None:
    config = replace(LOW_PRECISION, dropout=0.2, schedule=LRScheduleConfig(warmup=2))
    rule = replace(config.optimizer, name="muon", states="float32", in_backward=True, groups=("embed*:lr=0.5",))
    config = replace(config, optimizer=rule, clip=0.0)
    report = verify(GPT, "dp=2,zero=3", config=config, pool=pool, steps=3)
    assert report.passed, report
    assert {"dtype", "compress"} <= {each.key for each in report.replaced}


def test_the_rounding_of_zero_gradients_does_not_fail_an_asynchronous_run(pool: RankPool) -> None:
    """The gradient of a key's bias is zero but for rounding, of which AdamW's usual epsilon leaves a share."""
    config = Config.load(None, ["tied=false"])
    report = verify("gpt-tiny", "pp=2,schedule=pipedream,accumulate=4", config=config, pool=pool)
    assert report.passed, report
