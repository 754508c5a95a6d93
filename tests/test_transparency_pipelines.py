"""Synchronous pipelines equal one device: every schedule with every number of microbatches, all options pairwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
import torch
from tiny_engines import SGD, batch_of, engine_of, error, float64, largest_error, one_device, tiny, whole
from torch import Tensor

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.training.engine import Engine
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import VerifyCase

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "terapipe")
TWO_CHUNKS = ("interleaved", "zb-v", "dualpipe-v")
MESHES = ("", "dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sp=0", "dp=2,tp=2,zero=3")
OPTIONS: dict[str, tuple[object, ...]] = {
    "schedule": SCHEDULES,
    "microbatches": tuple(range(1, 10)),
    "mesh": MESHES,
    "pp": (2, 3, 4),
    "tied": (True, False),
    "dropout": (0.0, 0.1),
    "recompute": ("none", "full"),
    "family": ("gpt", "llama"),
}


@dataclass(frozen=True)
class Row:
    values: tuple[object, ...]

    def __getitem__(self, option: str) -> object:
        return self.values[list(OPTIONS).index(option)]

    @property
    def pairs(self) -> set[frozenset[tuple[str, object]]]:
        return {frozenset(pair) for pair in combinations(zip(OPTIONS, self.values, strict=True), 2)}

    @property
    def layout(self) -> Layout:
        mesh = f"{self['mesh']}," if self["mesh"] else ""
        rest = f"accumulate={self['microbatches']},recompute={self['recompute']}"
        return Layout.parse(f"{mesh}pp={self['pp']},schedule={self['schedule']},{rest}")

    @property
    def model(self) -> ModelConfig:
        """Uneven on every number of stages."""
        return replace(
            model_config.find_model(f"{self['family']}-tiny"),
            layers=9 if self["schedule"] in TWO_CHUNKS else 7,
            width=16,
            heads=4,
            kv_heads=2,
            ffn=24,
            max_seq_len=40,
            vocab=37,
            tied=self["tied"],
            dropout=self["dropout"],
        )

    def __str__(self) -> str:
        return f"{self.layout} {self['family']} {'tied' if self['tied'] else 'untied'} dropout={self['dropout']}"


def possible(row: Row) -> bool:
    """At most eight ranks."""
    return row["mesh"] != "dp=2,tp=2,zero=3" or row["pp"] == 2


def covering() -> Iterator[Row]:
    """Greedy: the row that covers most pairs not yet covered, among those with the next schedule and microbatches."""
    rest = [values for key, values in OPTIONS.items() if key not in ("schedule", "microbatches")]
    missing = {pair for values in product(*OPTIONS.values()) if possible(row := Row(values)) for pair in row.pairs}
    turn = 0
    while missing:
        heads = list(product(OPTIONS["schedule"], OPTIONS["microbatches"]))
        head = heads[turn % len(heads)]
        turn += 1
        rows = [row for values in product(*rest) if possible(row := Row((*head, *values)))]
        best = max(rows, key=lambda row: len(row.pairs & missing))
        if best.pairs & missing:
            missing -= best.pairs
            yield best


ROWS = list(covering())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_pipeline_equals_one_device(pool: RankPool, row: Row) -> None:
    # Slices of a sequence need one that is worth slicing.
    case = VerifyCase(model=row.model, steps=2, seq_len=33 if row["schedule"] == "terapipe" else 9)
    verdict = Verifier(pool, case).verify_layout(row.layout)
    assert verdict.passed, verdict
    assert verdict.max_error <= TOLERANCE


def test_the_array_covers_every_pair() -> None:
    covered = {pair for row in ROWS for pair in row.pairs}
    for (one, ones), (two, twos) in combinations(OPTIONS.items(), 2):
        for a, b in product(ones, twos):
            if {(one, a), (two, b)} & {("mesh", "dp=2,tp=2,zero=3")} and (
                ("pp", 3) in {(one, a), (two, b)} or ("pp", 4) in {(one, a), (two, b)}
            ):
                continue
            assert frozenset({(one, a), (two, b)}) in covered


# -- forwards alone ---------------------------------------------------------------------------------------------------

SAID = tiny("gpt", layers=4, tied=False, dropout=0.1)


def said(schedules: tuple[str, ...]) -> list[tuple[float, Tensor]]:
    """The loss of three microbatches and the logits, after a step that changes nothing: it has made its schedule."""
    found = []
    for schedule in schedules:
        engine = engine_of(SAID, f"pp=2,accumulate=3,schedule={schedule}")
        batch = batch_of(SAID, 6, length=32)
        engine.step(batch, lr=0.0)
        engine.drain()
        engine.model.eval()
        found.append(
            (engine.evaluate(engine.microbatches(batch)), engine.next_token_logits(batch["tokens"][:1], SAID.vocab))
        )
    return found


def test_evaluation_and_logits_equal_one_device(pool: RankPool) -> None:
    model, batch = one_device(SAID).eval(), batch_of(SAID, 6, length=32)
    with torch.no_grad():
        total, count = model(**batch)
        logits = model.logits(batch["tokens"][:1])[0, -1]
    for schedule, (loss, found) in zip(
        (*SCHEDULES, *ASYNC_SCHEDULES), pool.run(said, 2, (*SCHEDULES, *ASYNC_SCHEDULES))[0], strict=True
    ):
        assert loss == pytest.approx((total / count).item(), abs=TOLERANCE), schedule
        assert error(found, logits) <= TOLERANCE, schedule


# -- rank order -------------------------------------------------------------------------------------------------------


def trained_in_order(order: tuple[str, str]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and weights after two steps of dp=2,pp=2, and the pp coordinate of rank 1."""
    shape = tiny(layers=4)
    model, options = models.build(shape, "meta", dtype=torch.float64), float64(rank_order=order)
    engine = Engine(model, "dp=2,pp=2,accumulate=2", SGD, options=options)
    engine.model.train()
    losses = [engine.step(batch_of(shape, 8, seed=step)).loss for step in range(2)]
    return losses, whole(engine.parallel, "master"), engine.parallel.axes.mesh.coordinates(1)["pp"]


def test_both_rank_orders_train_alike(pool: RankPool) -> None:
    losses, weights, pp_rank = pool.run(trained_in_order, 4, ("pp", "dp"))[0]
    swapped_losses, swapped_weights, swapped_pp_rank = pool.run(trained_in_order, 4, ("dp", "pp"))[0]
    assert (pp_rank, swapped_pp_rank) == (0, 1)
    assert swapped_losses == pytest.approx(losses, abs=TOLERANCE)
    assert largest_error(swapped_weights, weights) <= TOLERANCE
