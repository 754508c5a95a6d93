"""`verify` on models of a user's own, and what it says where there is nothing to compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.placement import Placement
from echelon.layout.validation_error import ValidationError
from echelon.models import model_config
from echelon.verification import layout_matrix, verifier
from echelon.verification.compare import RankReport, run_and_compare
from echelon.verification.verifier import Verifier, with_two_sequences
from echelon.verification.verify_case import VerifyCase
from echelon.verification.verify_request import default_layouts, make_case, parse_layouts

SMALL = replace(model_config.find_model("llama-tiny"), layers=2, width=32, ffn=48, max_seq_len=64)


class Own(nn.Module):
    """Two layers, one weight that is frozen, and one that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.side, self.head = nn.Linear(6, 1), nn.Linear(6, 3)
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if (labels == 2).any():
            x = x + self.side(x) * (labels == 2)[:, None]
        return F.cross_entropy(self.head(x), labels, reduction="sum"), torch.tensor(len(x))


def build() -> nn.Module:
    return Own()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=source), "labels": torch.arange(rows) * 3 // rows}


def idle_batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Every other step leaves `side` unused."""
    found = batch(rows, seed)
    return {"x": found["x"], "labels": found["labels"] % (2 + seed % 2)}


@pytest.mark.parametrize("batches", [batch, idle_batch], ids=["used somewhere", "unused everywhere"])
def test_a_custom_model(pool: RankPool, batches: object) -> None:
    layouts = "dp=2; dp=3,zero=1,accumulate=2; dp=2,zero=2; dp=2,zero=3; dp=4,shard=2,zero=2"
    report = verifier.verify(build, layouts, batch=batches, pool=pool)  # type: ignore[arg-type]
    assert [verdict.passed for verdict in report.verdicts] == [True] * 5, report
    assert all(0 < verdict.max_error < 1e-10 for verdict in report.verdicts)


def test_a_reduction_left_out_of_a_custom_model(pool: RankPool) -> None:
    report = verifier.verify(build, "dp=2", batch=batch, pool=pool, leave_out="replica:all_reduce")
    assert not report.passed
    [found] = report.to_json()["layouts"]
    assert found["first_difference"]["parameter"] == "layers.0.weight"
    assert found["first_difference"]["axis"] == "dp"


def build_broken() -> nn.Module:
    class Broken(Own):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            if torch.distributed.get_world_size() > 1:
                raise ValueError("this line is the user's")
            return super().forward(x, labels)

    return Broken()


def test_a_layout_that_raises_fails_with_the_reason(pool: RankPool) -> None:
    report = verifier.verify(build_broken, "dp=2", batch=batch, pool=pool)
    [verdict] = report.verdicts
    assert not report.passed
    assert "this line is the user's" in verdict.trouble
    assert verdict.first_difference is None
    assert report.to_json()["layouts"][0]["trouble"] == verdict.trouble


class Unlisted(Own):
    """No list of layers, and no branch on values."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(self.head(torch.tanh(x)), labels, reduction="sum"), torch.tensor(len(x))


def unlisted_model() -> nn.Module:
    return Unlisted()


def test_a_refusal_is_its_sentence_alone(pool: RankPool) -> None:
    """The traceback is our own, and tells a user nothing."""
    report = verifier.verify(unlisted_model, "pp=2,accumulate=2", batch=batch, pool=pool)
    assert report.verdicts[0].trouble == (
        "a pipeline cuts a model between the layers that its forward calls, and Unlisted has no nn.ModuleList or "
        "nn.Sequential of them; list its layers, or use pp=1"
    )


def settings_batch(rows: int, seed: int) -> dict[str, object]:
    return {**batch(rows, seed), "mode": "sum"}


def test_a_batch_with_settings_is_refused(pool: RankPool) -> None:
    report = verifier.verify(build, "dp=2", batch=settings_batch, pool=pool)
    assert report.verdicts[0].trouble.startswith("a batch consists of tensors (mode: str); give")


def counting_copies(case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    """On a rank: a placement record in which everybody owns everything."""
    whole = Placement._is_owner
    Placement._is_owner = lambda self, entry: True  # type: ignore[method-assign]
    try:
        return run_and_compare(case, layout, leave_out, truth)
    finally:
        Placement._is_owner = whole  # type: ignore[method-assign]


def test_a_wrong_placement_is_found(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "run_and_compare", counting_copies)
    verdict = Verifier(pool, VerifyCase(model=SMALL, steps=1)).verify_layout(Layout.parse("tp=2"))
    assert not verdict.passed
    assert "elements and" in verdict.trouble


@pytest.mark.parametrize("layouts", ["tp=3; dp=2,zero=5", "pp=2,schedule=2bw,offload=optimizer; tp=8"])
def test_all_issues_of_all_layouts_are_reported_at_once(layouts: str) -> None:
    with pytest.raises(ValidationError) as error:
        verifier.verify("llama-tiny", layouts)
    assert len(error.value.issues) >= 2


def test_a_rank_gets_two_sequences_so_that_a_wrong_mean_shows() -> None:
    assert with_two_sequences(Layout.parse("dp=2")).microbatch == 2
    assert with_two_sequences(Layout.parse("dp=2,microbatch=3")).microbatch == 3


def test_the_truth_of_a_batch_is_computed_once(pool: RankPool) -> None:
    prover = Verifier(pool, VerifyCase(model=SMALL, steps=1))
    report = prover.report([Layout.parse(text) for text in ("dp=2", "dp=2,zero=3", "dp=2,tp=2", "dp=2,accumulate=2")])
    assert report.passed
    assert sorted(key[-2:] for key in prover._truth_files) == [(4, 1), (8, 2)]


def test_verify_all_has_every_layout_and_option() -> None:
    assert len(layout_matrix.ALL_LAYOUTS) == 33 + 14
    found = list(layout_matrix.variants())
    assert len(found) == len({(v.label, v.accumulate, v.recompute) for v in found}) == 3 * 2**5
    assert len(layout_matrix.ALL_MOE_LAYOUTS) == 26
    assert len(list(layout_matrix.moe_variants())) == 36
    for variant in layout_matrix.moe_variants():
        assert len(parse_layouts(layout_matrix.ALL_MOE_LAYOUTS, variant.case)) == 26


def test_moe_models_have_default_moe_layouts() -> None:
    assert "ep=2" in default_layouts(make_case("moe-tiny"))
    assert "ep=2" not in default_layouts(make_case("llama-tiny"))
    for name in ("moe-tiny", "deepseek-v3", "switch-base-8"):
        assert len(parse_layouts(default_layouts(case := make_case(name)), case)) == 12
