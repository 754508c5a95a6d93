"""Every layout equals one device: each layout with each value of each option, and all options pairwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import pytest

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.model_config import ModelConfig
from echelon.verification.layout_matrix import ALL_LAYOUTS, VerifyVariant, variants
from echelon.verification.verifier import TOLERANCE, LayoutVerdict, Verifier

LAYOUTS = [layout for layout in ALL_LAYOUTS if "pp=" not in layout]
"""those of pipelines are in test_transparency_pipelines.py"""


@dataclass(frozen=True)
class Row:
    """One case: a layout, and a variant of everything that layouts should not mind."""

    layout: str
    variant: VerifyVariant

    @property
    def values(self) -> frozenset[tuple[str, object]]:
        """The layout and every option's value."""
        variant, model = self.variant, self.variant.case.model
        assert isinstance(model, ModelConfig)
        return frozenset(
            {
                "layout": self.layout,
                "family": model.family,
                "tied": model.tied,
                "dropout": model.dropout,
                "optimizer": variant.case.optimizer.name,
                "accumulate": variant.accumulate,
                "recompute": variant.recompute,
            }.items()
        )

    @property
    def pairs(self) -> set[frozenset[tuple[str, object]]]:
        return {frozenset(pair) for pair in combinations(self.values, 2)}

    def __str__(self) -> str:
        return f"{self.layout} {self.variant.label} x{self.variant.accumulate} {self.variant.recompute}"


def covering() -> Iterator[Row]:
    """Greedy: for each layout, the variants that cover most pairs not yet covered, until all of the layout's are."""
    every = list(variants())
    missing = {pair for layout in LAYOUTS for variant in every for pair in Row(layout, variant).pairs}
    for index, layout in enumerate(LAYOUTS):
        # Ties go to another variant for each layout, so that triples vary too.
        turn = index * 11 % len(every)
        rows = [Row(layout, variant) for variant in every[turn:] + every[:turn]]
        while any(("layout", layout) in pair for pair in missing):
            row = max(rows, key=lambda row: len(row.pairs & missing))
            missing -= row.pairs
            yield row


ROWS = list(covering())


def small(variant: VerifyVariant, layers: int = 2) -> VerifyVariant:
    """Fewer, narrower layers, for time; vocabulary and sequence stay as odd as they are."""
    model = variant.case.model
    assert isinstance(model, ModelConfig)
    model = replace(model, layers=layers, width=32, ffn=48, max_seq_len=64)
    return replace(variant, case=replace(variant.case, model=model))


@pytest.fixture(scope="module")
def provers(pool: RankPool) -> dict[tuple[str, int], Verifier]:
    """One per model, rule and depth: layouts share the truth of what one device computes."""
    cases = {(variant.label, layers): small(variant, layers).case for variant in variants() for layers in (1, 2)}
    return {key: Verifier(pool, case) for key, case in cases.items()}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_equals_one_device(provers: dict[tuple[str, int], Verifier], row: Row) -> None:
    layers = 1 if Layout.parse(row.layout).world > 3 else 2  # time goes with ranks; `make soak` has all at full size
    check(judge(provers[row.variant.label, layers], row))


@pytest.mark.soak
@pytest.mark.parametrize(
    "variant", [v for v in variants() if v.accumulate == 4], ids=lambda v: f"{v.label} {v.recompute}"
)
def test_every_variant_on_the_largest_layouts(pool: RankPool, variant: VerifyVariant) -> None:
    """A slice of the full product at full size; `echelon verify --all` runs all of it."""
    prover = Verifier(pool, variant.case)
    for layout in ("dp=4,shard=2", "dp=2,tp=4,zero=3"):
        check(judge(prover, Row(layout, variant)))


def judge(prover: Verifier, row: Row) -> LayoutVerdict:
    layout = Layout.parse(row.layout).replace(accumulate=row.variant.accumulate, recompute=row.variant.recompute)
    return prover.verify_layout(layout)


def check(verdict: LayoutVerdict) -> None:
    assert verdict.passed, verdict
    assert verdict.max_error <= TOLERANCE


# -- the covering array itself ----------------------------------------------------------------------------------------


def test_every_layout_meets_every_value_of_every_option_and_options_meet_pairwise() -> None:
    covered = {pair for row in ROWS for pair in row.pairs}
    assert covered == {pair for layout in LAYOUTS for variant in variants() for pair in Row(layout, variant).pairs}


def test_the_array_is_as_small_as_it_can_be() -> None:
    assert len(ROWS) == 3 * len(LAYOUTS)  # recompute has three values, and each layout meets them all


def test_the_array_is_the_same_every_time() -> None:
    assert list(covering()) == ROWS


def test_the_layouts_and_values_are_those_that_were_promised() -> None:
    expected = [
        "dp=2", "dp=3", "dp=4", "dp=8",
        "dp=2,zero=1", "dp=3,zero=1", "dp=4,zero=1", "dp=2,zero=2", "dp=3,zero=2", "dp=4,zero=2",
        "dp=2,zero=3", "dp=3,zero=3", "dp=4,zero=3", "dp=4,shard=2",
        "tp=2,sp=0", "tp=2,sp=1", "tp=4,sp=0", "tp=4,sp=1",
        "dp=2,tp=2,zero=0", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2", "dp=2,tp=2,zero=3",
        "dp=2,tp=4,zero=0", "dp=2,tp=4,zero=1", "dp=2,tp=4,zero=2", "dp=2,tp=4,zero=3",
        "tp=4,tp_kind=2d", "dp=2,tp=4,tp_kind=2d", "tp=8,tp_kind=2.5d,depth=2", "tp=8,tp_kind=3d",
        "cp=2", "dp=2,cp=2,cp_kind=gather,zero=3", "cp=4,cp_kind=ring-ulysses,ulysses=2",
    ]  # fmt: skip
    assert sorted(LAYOUTS) == sorted(expected)
    values = {value for row in ROWS for value in row.values if value[0] != "layout"}
    assert values == {
        *(("family", family) for family in ("gpt", "llama")),
        *(("tied", tied) for tied in (True, False)),
        *(("dropout", dropout) for dropout in (0.0, 0.1)),
        *(("optimizer", rule) for rule in ("adamw", "sgd")),
        *(("accumulate", accumulate) for accumulate in (1, 4)),
        *(("recompute", recompute) for recompute in ("none", "full", "ops")),
    }
    for row in ROWS:
        for case in (row.variant.case, small(row.variant).case):
            assert isinstance(case.model, ModelConfig)
            assert (case.model.vocab, case.seq_len) == (257, 33)
            assert case.steps == 5
