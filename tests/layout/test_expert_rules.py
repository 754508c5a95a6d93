"""What experts ask of a layout."""

from __future__ import annotations

import pytest

from echelon.layout import ValidationError, check_layout
from echelon.models.model_config import find_model


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        ("moe-tiny", "dp=1,pp=2,schedule=terapipe", "MoE gates route full ones"),
        ("moe-tiny", "dp=3,ep=3", "ep=3 does not divide the 8 experts of a layer (moe-tiny); legal: 1"),
        ("llama-tiny", "dp=2,ep=2", "divides experts, and llama-tiny has none"),
        ("moe-tiny", "tp=2,sp=0", "is incompatible with experts, whose tokens are divided over tp by position"),
        ("deepseek-tiny", "pp=2,schedule=2bw,accumulate=4", "balances by the expert load of a step (deepseek-v3)"),
        ("moe-tiny", "tp=4,pp=2,schedule=pipedream,accumulate=4,zero=3", "several unsharded versions of the weights"),
        ("moe-tiny", "dp=4,ep=4,ep_inner=4", "does not divide the expert ranks into several nodes"),
        ("moe-tiny", "dp=4,ep=2,etp=2,ep_inner=3", "does not divide the expert ranks into several nodes"),
        ("moe-tiny", "dp=12,shard=6,ep=4", "shard=6 lets a copy of the experts cross HSDP groups (ep x etp = 4"),
        ("moe-tiny", "tp=4,tp_kind=2d", "is incompatible with experts, whose tokens are divided over tp by position"),
    ],
)
def test_layouts_incompatible_with_experts(model: str, text: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        check_layout(text, model=find_model(model))
    assert words in str(caught.value)


def test_layouts_compatible_with_experts() -> None:
    check_layout("dp=4,shard=2,ep=4", model=find_model("moe-tiny"))
    check_layout("dp=2,tp=2,ep=4", model=find_model("moe-tiny"))
    check_layout("pp=2,schedule=2bw,accumulate=4", model=find_model("moe-tiny"))
    check_layout("tp=4,pp=2,schedule=pipedream,accumulate=4,ep=4,zero=3", model=find_model("moe-tiny"))
    check_layout("dp=1,pp=2,schedule=terapipe", model=find_model("llama-tiny"))
