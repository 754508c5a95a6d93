"""Every kind of context parallelism equals one device: causal and full, packed documents, any length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.verification.verifier import LayoutVerdict, Verifier
from echelon.verification.verify_case import VerifyCase

SMALL = {"layers": 2, "width": 48, "heads": 6, "kv_heads": 2, "ffn": 48, "max_seq_len": 64}
LLAMA = replace(model_config.find_model("llama-tiny"), **SMALL)
FOUR = replace(LLAMA, width=32, heads=4)
GPT = replace(model_config.find_model("gpt-tiny"), **{**SMALL, "kv_heads": 6}, dropout=0.1)
PRIME = 37
"""tokens of a sequence that no number of ranks divides"""

KINDS = (
    *(f"cp={cp},cp_kind={kind}" for kind in ("ring", "gather") for cp in (2, 3, 4)),
    "cp=2,cp_kind=ulysses",
    "cp=3,cp_kind=ulysses",
    "cp=6,cp_kind=ring-ulysses,ulysses=3",
)
FOR_FOUR_HEADS = ("cp=4,cp_kind=ulysses", "cp=4,cp_kind=ring-ulysses,ulysses=2")


def judge(pool: RankPool, model: ModelConfig, layout: str, **case: object) -> LayoutVerdict:
    prover = Verifier(pool, VerifyCase(model=model, steps=2, seq_len=PRIME, **case))  # type: ignore[arg-type]
    verdict = prover.verify_layout(Layout.parse(layout))
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"
    return verdict


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", [*KINDS, *FOR_FOUR_HEADS])
def test_a_kind_equals_one_device(pool: RankPool, layout: str, causal: bool, packed: bool) -> None:
    """Two key-value heads are fewer than the ranks that exchange heads. Dropout where documents are packed."""
    model = FOUR if layout in FOR_FOUR_HEADS else GPT if "cp=3" in layout and packed else LLAMA
    model = replace(model, causal=causal, dropout=0.1 if packed else 0.0)
    judge(pool, model, layout, packed=packed)


COMBINED = (
    "dp=2,cp=2,zero=3,recompute=full,accumulate=2",
    "cp=2,zero=2,accumulate=2",
    "dp=4,shard=2,cp=2",
    "tp=2,cp=2",
    "tp=2,sp=0,cp=3,cp_kind=gather,recompute=full",
    "tp=2,cp=2,cp_kind=ulysses,recompute=ops",
    "tp=2,cp=4,cp_kind=ring-ulysses,ulysses=2",
    "pp=2,cp=2,accumulate=3",
    "pp=2,cp=2,cp_kind=ulysses,schedule=zb-v,accumulate=2",
    "pp=2,cp=2,cp_kind=gather,schedule=interleaved,accumulate=2,recompute=full",
    "pp=2,cp=2,schedule=2bw,accumulate=2",
    "tp=2,pp=2,cp=2,recompute=ops,accumulate=2",
    "dp=2,pp=2,cp=2,zero=3,accumulate=2",
    "tp=2,pp=2,cp=2,accumulate=2",
    "tp=4,tp_kind=2d,cp=2",
    "tp=4,tp_kind=2d,cp=2,cp_kind=ulysses,recompute=full",
)


@pytest.mark.parametrize("layout", COMBINED)
def test_a_combination_equals_one_device(pool: RankPool, layout: str) -> None:
    model = replace(FOUR, layers=4 if "pp=" in layout else 2, dropout=0.1)
    judge(pool, model, layout, packed=True)


def test_a_tied_embedding_and_positions_of_a_table(pool: RankPool) -> None:
    for layout in ("cp=3", "tp=2,cp=2", "pp=2,cp=2,accumulate=2"):
        judge(pool, replace(GPT, layers=3), layout, packed=True)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_ranks_without_a_token_issue_the_same_collectives(pool: RankPool, length: int) -> None:
    """Fewer tokens than chunks: some ranks hold padding only, and no rank hangs."""
    prover = Verifier(pool, VerifyCase(model=FOUR, steps=2, seq_len=length))
    for layout in ("cp=4", "cp=4,cp_kind=gather", "cp=4,cp_kind=ulysses"):
        verdict = prover.verify_layout(Layout.parse(layout))
        assert verdict.passed, f"{layout}: {verdict.first_difference} {verdict.trouble}"


LEFT_OUT = [
    ("cp=3", "cp:send", "cp"),
    ("cp=2,cp_kind=gather", "cp:all_gather", "cp"),
    ("cp=2,cp_kind=gather", "cp:reduce_scatter", "cp"),
    ("cp=2,cp_kind=ulysses", "cp:all_to_all", "cp"),
    ("cp=4,cp_kind=ring-ulysses,ulysses=2", "ring:send", "cp"),
    ("cp=4,cp_kind=ring-ulysses,ulysses=2", "ulysses:all_to_all", "cp"),
    ("cp=2", "replica*cp:all_reduce", "cp"),
    ("cp=2,zero=1", "shard*cp:reduce_scatter", "cp"),
    ("cp=2,zero=3", "shard*cp:all_gather", "cp"),
    ("cp=2", "dp*cp:all_reduce", "cp"),
    ("dp=2,cp=2", "cp:send", "cp"),
    ("tp=2,cp=2", "cp:send", "cp"),
    ("tp=2,cp=2", "tp:all_gather", "tp"),
    ("pp=2,cp=2,accumulate=2", "cp:send", "cp"),
]


@pytest.mark.parametrize(("layout", "leave_out", "axis"), LEFT_OUT)
def test_verify_detects_a_dropped_transfer(pool: RankPool, layout: str, leave_out: str, axis: str) -> None:
    prover = Verifier(pool, VerifyCase(model=FOUR, steps=2, seq_len=PRIME), leave_out)
    verdict = prover.verify_layout(Layout.parse(layout))
    assert not verdict.passed
    assert not verdict.trouble
    assert verdict.axis == axis
