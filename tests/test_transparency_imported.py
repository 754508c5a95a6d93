"""Every layout equals one device: what models have that only imported ones use (biases, stretched angles)."""

from __future__ import annotations

import pytest

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.attention_config import Llama3RopeScaling
from echelon.models.model_config import ModelConfig
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


LAYOUTS = ("dp=2,zero=3", "tp=2", "tp=4", "tp=4,tp_kind=2d", "cp=2", "pp=2", "tp=2,recompute=full")


@pytest.fixture(scope="module")
def prover(pool: RankPool) -> Verifier:
    return Verifier(pool, VerifyCase(model=QWEN2, steps=3))  # biases are 0 before the first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_stretched_angles(layout: str, prover: Verifier) -> None:
    verdict = prover.verify_layout(Layout.parse(layout))
    assert verdict.passed, verdict
    assert verdict.max_error <= TOLERANCE
