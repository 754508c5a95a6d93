"""Every layout equals one device: what models have that only imported ones use (biases, stretched angles)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.attention_config import Llama3RopeScaling, YarnRopeScaling
from echelon.models.model_config import ModelConfig, find_model
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import VerifyCase

QWEN2 = ModelConfig(
    name="qwen2-tiny",
    family="llama",
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    vocab=97,
    max_seq_len=64,
    qkv_bias=True,
    rope_scaling=Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32),
)


DEEPSEEK = replace(
    find_model("deepseek-tiny"),
    layers=2,
    rope_scaling=YarnRopeScaling(factor=40.0, original_max_seq_len=16, mscale=0.7, mscale_all_dim=1.0),
)
"""scores that YaRN scales"""

LAYOUTS = ("dp=2,zero=3", "tp=2", "tp=4", "tp=4,tp_kind=2d", "cp=2", "pp=2", "tp=2,recompute=full")


@pytest.fixture(scope="module")
def prover(pool: RankPool) -> Verifier:
    return Verifier(pool, VerifyCase(model=QWEN2, steps=3))  # biases are 0 before the first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_stretched_angles(layout: str, prover: Verifier) -> None:
    verdict = prover.verify_layout(Layout.parse(layout))
    assert verdict.passed, verdict
    assert verdict.max_error <= TOLERANCE


@pytest.mark.parametrize("layout", ["tp=2,ep=2", "cp=2,recompute=selective", "pp=2,accumulate=2"])
def test_scores_that_yarn_scales(layout: str, pool: RankPool) -> None:
    verdict = Verifier(pool, VerifyCase(model=DEEPSEEK, steps=2, seq_len=33)).verify_layout(Layout.parse(layout))
    assert verdict.passed, verdict
