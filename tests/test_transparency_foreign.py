"""Every layout equals one device for classes of transformers, which run unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_families import FAMILIES, MOE_FAMILIES, write_family
from other_families import other_families, write_other_family

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import VerifyCase

pytest.importorskip("transformers")

DENSE = ("dp=2", "dp=2,zero=3", "tp=2,sp=0", "tp=2", "pp=2,accumulate=2", "dp=2,tp=2,pp=2,zero=1")
OFTEN = [
    ("llama", "tp=2"),
    ("llama", "tp=4,recompute=full"),
    ("llama", "cp=2,tp=2"),
    ("llama", "cp=4,cp_kind=ring-ulysses,ulysses=2"),
    ("gpt2", "dp=2,zero=3,recompute=full"),
    ("gpt2", "tp=2"),
    ("gpt2", "dp=2,tp=2,pp=2,zero=1"),
    ("gpt2", "cp=2,pp=2,accumulate=2"),
    ("opt", "tp=2"),
    ("phi3", "tp=2,sp=0"),
    ("falcon", "tp=2"),
    ("bloom", "tp=2"),
    ("gemma3", "pp=2,schedule=interleaved,vpp=2,accumulate=2"),
    ("gpt_neox", "pp=4,schedule=zb-h1,accumulate=4"),
    ("deepseek_v3", "dp=2,tp=2,ep=2"),
    ("gpt_oss", "tp=2,ep=2"),
    ("mixtral", "dp=2,pp=2,ep=2,accumulate=2"),
    ("mixtral", "dp=2,cp=2,ep=4,zero=3"),
    ("qwen3_next", "tp=2"),
    ("mamba2", "dp=2,tp=2,pp=2,zero=1"),
    ("mistral", "cp=4,cp_kind=ring-ulysses,ulysses=2"),
    ("gemma2", "cp=3,cp_kind=gather"),
    ("gpt_oss", "cp=2,tp=2,sp=0"),
    ("gpt_oss", "cp=2,cp_kind=ulysses,recompute=full"),
    ("gptj", "cp=2,tp=2"),
    ("qwen3_next", "cp=2,pp=2,accumulate=2,recompute=full"),
    ("mamba2", "dp=2,cp=2,zero=3"),
    ("deepseek_v3", "tp=2,sp=0,ep=2"),
]


OTHERS = [
    ("diffllama", "dp=2"),
    ("bart", "tp=2"),
    ("camembert", "tp=2"),
    ("dbrx", "tp=2"),
    ("gpt_bigcode", "tp=2"),
    ("gpt_neox_japanese", "tp=2,sp=0"),
    ("inkling_text", "tp=2,sp=0"),
    ("longcat_flash", "tp=2"),
    ("phimoe", "tp=2"),
    ("zamba", "tp=2,sp=0"),
    ("biogpt", "pp=2,accumulate=2"),
    ("roformer", "pp=2,accumulate=2"),
    ("deepseek_v4", "tp=2"),
    ("deepseek_v4", "cp=2"),
    ("openai-gpt", "cp=2"),
    ("bart", "cp=2,tp=2"),
    ("roberta", "cp=2,pp=2,accumulate=2"),
]
"""each was wrong, or raised, before a change of the mechanism"""


def columns(name: str) -> tuple[str, ...]:
    """The layouts that a family is verified on."""
    experts = ("dp=2,ep=2",) if name in MOE_FAMILIES else ()
    return (*DENSE, "cp=2", *experts)


def verify(
    name: str,
    layout: str,
    pool: RankPool,
    folder: Path,
    *,
    leave_out: str = "",
    steps: int = 2,
    packed: bool = False,
    **changes: Any,
) -> bool:
    folder = (write_family if name in FAMILIES else write_other_family)(name, folder, **changes)
    case = VerifyCase(model=f"hf:{folder}", steps=steps, seq_len=17, packed=packed)
    verdict = Verifier(pool, case, leave_out).verify_layout(Layout.parse(layout))
    assert not verdict.trouble, verdict.trouble
    assert verdict.passed == (verdict.max_error <= TOLERANCE), verdict
    return verdict.passed


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # a class of transformers uses it
@pytest.mark.parametrize(("name", "layout"), [*OFTEN, *OTHERS])
def test_a_foreign_model_computes_what_one_device_does(name: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    assert verify(name, layout, pool, tmp_path)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
LIMITS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16},
    "llama4_text": {"floor_scale": 10},
}
"""scales that change where the tokens of a trial end, and before those of the sequence do"""


@pytest.mark.parametrize("name", LIMITS)
def test_scales_that_follow_from_the_length_are_those_of_full_sequences(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    """The second rank has no token beyond the limit of `phi3`."""
    assert verify(name, "cp=2", pool, tmp_path, steps=1, **LIMITS[name])


@pytest.mark.soak
@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in FAMILIES for layout in columns(name)])
def test_every_family_on_every_axis(name: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    assert verify(name, layout, pool, tmp_path, steps=3)


@pytest.mark.soak
@pytest.mark.parametrize("layout", [*DENSE, "cp=2", "dp=2,ep=2"])
@pytest.mark.parametrize("name", other_families())
def test_every_other_family_on_every_axis(name: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    """It computes what one device does, or is refused in one sentence."""
    case = VerifyCase(model=f"hf:{write_other_family(name, tmp_path)}", steps=2, seq_len=17)
    verdict = Verifier(pool, case).verify_layout(Layout.parse(layout))
    assert verdict.passed or verdict.trouble
    assert len(verdict.trouble.splitlines()) <= 1, verdict.trouble


LEFT_OUT = [
    ("tp=2,sp=0", "tp:all_reduce"),
    ("tp=2", "tp:reduce_scatter"),
    ("tp=2", "tp:all_gather"),
    ("tp=2", "tp:all_reduce"),
]


@pytest.mark.parametrize("name", ["phi3", "deepseek_v3"])
@pytest.mark.parametrize(("layout", "left_out"), LEFT_OUT)
def test_a_derived_plan_without_a_collective_fails(
    name: str, layout: str, left_out: str, pool: RankPool, tmp_path: Path
) -> None:
    assert not verify(name, layout, pool, tmp_path, leave_out=left_out)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "mamba2"])
@pytest.mark.parametrize(("layout", "left_out"), LEFT_OUT)
def test_more_derived_plans_without_a_collective_fail(
    name: str, layout: str, left_out: str, pool: RankPool, tmp_path: Path
) -> None:
    assert not verify(name, layout, pool, tmp_path, leave_out=left_out)


ROUTED = (
    *("tp=2", "cp=2,tp=2,sp=0,ep=4", "pp=2,cp=2,accumulate=2,recompute=full", "dp=2,zero=3,ep=2"),
    "pp=2,schedule=zb-h1,accumulate=2",
)
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("layout", ROUTED)
def test_balance_losses_of_routers(layout: str, pool: RankPool, tmp_path: Path) -> None:
    """Seventeen tokens: ranks of cp and tp have padding, whose routes do not count."""
    assert verify("mixtral", layout, pool, tmp_path, **BALANCED)


DROPPED: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize("layout", ["tp=2", "cp=2,tp=2"])
def test_dropout_inside_modules_that_stay_whole(layout: str, pool: RankPool, tmp_path: Path) -> None:
    assert verify("bloom", layout, pool, tmp_path, **DROPPED)


@pytest.mark.parametrize(("name", "layout"), [("mistral", "cp=3"), ("gptj", "cp=2"), ("gpt2", "cp=2,cp_kind=ulysses")])
def test_packed_documents_over_ranks(name: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    """Under a window, in gathered modules, and with positions that are looked up in a table."""
    assert verify(name, layout, pool, tmp_path, packed=True)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("gptj", "cp:all_gather"), ("gptj", "cp:reduce_scatter"), ("mixtral", "cp:all_reduce"), ("gpt_oss", "cp:send")],
)
def test_divided_sequences_without_a_collective_fail(name: str, left_out: str, pool: RankPool, tmp_path: Path) -> None:
    changes = BALANCED if name == "mixtral" else {}
    assert not verify(name, "cp=2", pool, tmp_path, leave_out=left_out, **changes)
