"""Folding a layout to fewer ranks: what it keeps, in which order, and what it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.layout import Layout, ValidationError
from echelon.layout.rules import find_issues
from echelon.moe import build_gate, group_options
from echelon.verification.fold_layout import FoldedLayout, fold_layout
from echelon.verification.layout_case import case_for_layout
from echelon.verification.verify_request import VerifyRequest, default_layouts, make_case


def fold(text: str, ranks: int = 8, **options: bool) -> FoldedLayout:
    return fold_layout(Layout.parse(text), ranks, **options)


@pytest.mark.parametrize(
    ("layout", "ranks", "folded"),
    [
        ("dp=2,tp=4", 8, "dp=2,tp=4"),
        ("dp=4,tp=8,pp=2,schedule=zb-v", 64, "dp=4,tp=8,pp=2,schedule=zb-v"),
        ("dp=4,tp=8,pp=2,schedule=zb-v", 32, "dp=2,tp=8,pp=2,schedule=zb-v"),
        ("dp=4,tp=8,pp=2,schedule=zb-v", 16, "dp=2,tp=4,pp=2,schedule=zb-v"),
        ("dp=4,tp=8,pp=2,schedule=zb-v", 8, "dp=2,tp=2,pp=2,schedule=zb-v"),
        ("dp=4,tp=8,pp=2,schedule=zb-v", 4, "tp=2,pp=2,schedule=zb-v"),
        ("tp=8,pp=16,schedule=interleaved,vpp=3", 8, "tp=4,pp=2,schedule=interleaved,vpp=3"),
        # Stages between the first and the last run code of their own.
        ("tp=8,pp=16", 8, "tp=2,pp=4"),
        ("dp=64,zero=3", 8, "dp=8,zero=3"),
        ("dp=64,zero=2,shard=8", 8, "dp=8,zero=2,shard=4"),
        ("dp=64,zero=2,shard=8,tp=2", 8, "dp=4,zero=2,shard=2,tp=2"),
        ("dp=13,tp=3", 8, "dp=2,tp=3"),
        # zero shards over dp and cp: without dp it still does.
        ("dp=4,zero=1,tp=4,cp=4,pp=4", 8, "dp=1,zero=1,tp=2,cp=2,pp=2"),
        ("dp=16,tp=8,pp=2,ep=128,ep_inner=8", 8, "dp=2,tp=2,pp=2,ep=4,ep_inner=2"),
        ("dp=16,ep=4,etp=2", 8, "dp=8,ep=2,etp=2"),
        ("dp=32,ep=8", 8, "dp=8,ep=4"),
        ("cp=16,cp_kind=ring-ulysses,ulysses=4", 8, "cp=8,cp_kind=ring-ulysses,ulysses=4"),
        ("cp=16,cp_kind=ulysses", 8, "cp=8,cp_kind=ulysses"),
        ("dp=4,tp=64,tp_kind=3d", 8, "dp=1,tp=8,tp_kind=3d"),
        ("dp=4,tp=16,tp_kind=2d", 8, "dp=2,tp=4,tp_kind=2d"),
        ("tp=32,tp_kind=2.5d,depth=2", 8, "tp=8,tp_kind=2.5d,depth=2"),
    ],
)
def test_every_axis_of_several_ranks_keeps_several(layout: str, ranks: int, folded: str) -> None:
    assert fold(layout, ranks).layout == Layout.parse(folded)


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        ("accumulate=8", 8),
        ("accumulate=9", 4),
        ("pp=2,accumulate=8", 8),
        ("pp=2,accumulate=128", 4),
        ("pp=2,accumulate=129", 5),
        ("pp=4,accumulate=128", 8),
        # Fewer microbatches than stages stay fewer.
        ("pp=16,accumulate=5", 5),
        ("pp=32,tp=2,accumulate=6", 3),
    ],
)
def test_microbatches_are_folded_to_the_steady_state(layout: str, accumulate: int) -> None:
    assert fold(layout).layout.accumulate == accumulate


def test_changes_name_every_folded_key_and_nothing_else() -> None:
    folded = fold("dp=4,tp=8,pp=2,schedule=zb-v,microbatch=16,accumulate=128,recompute=ops")
    assert folded.changes == "dp=4 to 2, tp=8 to 2, microbatch=16 to 2, accumulate=128 to 4"
    assert fold("dp=2,tp=2").changes == ""
    assert fold("dp=4,tp=4,cp=4,cp_kind=ulysses,pp=4,schedule=zb-v", 4).changes == (
        "dp=4 to 1, tp=4 to 2, cp=4 to 2, pp=4 to 1, schedule=zb-v to 1f1b"
    )


def test_a_custom_model_divides_by_divisors_alone() -> None:
    assert fold("dp=2,tp=9", 4).layout == Layout.parse("dp=2,tp=2")
    assert fold("dp=2,tp=9", 4, model_follows=False).layout == Layout.parse("dp=1,tp=3")


def test_the_schedule_of_a_file_is_not_folded() -> None:
    text = "dp=4,tp=2,pp=3,schedule=file:s.txt,accumulate=60"
    assert fold(text).layout == Layout.parse("dp=1,tp=2,pp=3,schedule=file:s.txt,accumulate=60")
    with pytest.raises(ValidationError, match="whose schedule is a file for 3 pipeline ranks"):
        fold(text, 2)


degrees = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 16])


@given(degrees, degrees, degrees, degrees, degrees, st.integers(0, 3), st.sampled_from([2, 3, 4, 6, 8, 12, 16]))
def test_a_folded_layout_is_valid_and_small(dp: int, tp: int, cp: int, pp: int, ep: int, zero: int, ranks: int) -> None:
    layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, ep=ep if dp * cp * tp % ep == 0 else 1)
    folded = fold_layout(layout, ranks).layout
    assert folded.world <= max(ranks, 1)
    assert find_issues(folded) == []
    axes = [axis for axis in ("dp", "tp", "cp", "pp") if getattr(layout, axis) > 1]
    kept = [axis for axis in axes if getattr(folded, axis) > 1]
    assert len(kept) >= min(len(axes), ranks.bit_length() - 1)
    assert all(getattr(folded, axis) <= getattr(layout, axis) for axis in ("dp", "tp", "cp", "pp", "ep"))


# -- the reduced model follows ---------------------------------------------------------------------------------------


def sizes(model: str, layout: str, ranks: int = 64) -> tuple[int, int, int, int]:
    request = VerifyRequest(model=model, layouts=layout, max_ranks=ranks).resolve()
    small = case_for_layout(request.case, request.layouts[0]).case.model
    assert not isinstance(small, str)
    return small.layers, small.heads, small.kv_heads, small.moe.experts if small.moe else 0


@pytest.mark.parametrize(
    ("model", "layout", "expected"),
    [
        ("llama-70b", "dp=2", (4, 8, 2, 0)),
        # 8 kv heads: one per rank, four query heads each.
        ("llama-70b", "tp=8", (4, 32, 8, 0)),
        # Two ranks share each kv head.
        ("llama-70b", "tp=16", (4, 32, 8, 0)),
        ("llama-3b", "tp=2", (4, 6, 2, 0)),
        ("gpt3-175b", "tp=3", (4, 6, 6, 0)),
        ("gpt2-1.5b", "tp=5", (4, 5, 5, 0)),
        ("llama-70b", "pp=16", (16, 8, 2, 0)),
        ("llama-70b", "pp=4,schedule=interleaved,vpp=5", (20, 8, 2, 0)),
        # 126 layers are uneven over 4 stages.
        ("llama-405b", "pp=4", (5, 8, 2, 0)),
        ("deepseek-v3", "dp=32,ep=32", (4, 4, 4, 32)),
        ("deepseek-v2", "dp=10,ep=10", (4, 4, 4, 20)),
        ("mixtral-8x7b", "dp=8,ep=8", (4, 8, 2, 8)),
        ("llama-70b", "tp=2,cp=16,cp_kind=ring-ulysses,ulysses=8", (4, 32, 8, 0)),
    ],
)
def test_a_reduced_model_has_the_sizes_that_its_layout_divides(
    model: str, layout: str, expected: tuple[int, int, int, int]
) -> None:
    assert sizes(model, layout) == expected


def test_ranks_share_kv_heads_after_folding_as_before() -> None:
    assert sizes("llama-70b", "dp=8,tp=16", 4) == (4, 4, 1, 0)
    assert sizes("llama-70b", "dp=8,tp=8", 4) == (4, 8, 2, 0)


@pytest.mark.parametrize("experts", [16, 18, 20, 22, 23])
def test_groups_of_experts_divide_any_number_of_them(experts: int) -> None:
    options = group_options("deepseek-v3", experts, {"num_groups": 8, "group_limit": 4, "scale": 2.5})
    assert build_gate("deepseek-v3", 16, experts, 4, **options).num_experts == experts


def test_a_layout_is_refused_by_the_full_model_not_the_reduced_one() -> None:
    with pytest.raises(ValidationError, match="tp=3 does not divide 64 heads"):
        VerifyRequest(model="llama-70b", layouts="tp=3").resolve()
    with pytest.raises(ValidationError, match="leaves stages without a layer"):
        VerifyRequest(model="llama-1b", layouts="pp=17").resolve()


def test_default_layouts_divide_the_model() -> None:
    layouts = default_layouts(make_case("gpt2-1.5b"))  # 25 heads
    assert "pp=2" in layouts
    assert "tp=" not in layouts
    assert len(VerifyRequest(model="gpt2-1.5b").resolve().layouts) == len(layouts.split(";"))
