"""States on the host that the device updates: the same weights as without offload, page by page."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import collective_cost_check
import pytest
import torch
from offload_engines import SHAPE, engine_away, link_of, stepped
from tiny_engines import batch_of, largest_error, tiny, whole
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.disk_store import DiskStore
from echelon.models.model_config import ModelConfig
from echelon.optim import offload_support, paged_optimizer
from echelon.optim.update_rule import UpdateRule
from echelon.training import step_comm_volume
from echelon.training.engine import Engine
from tests.optim.same_gradients import fed

RULES = {
    "lamb": OptimizerConfig(name="lamb", lr=1e-2),
    "adafactor": OptimizerConfig(name="adafactor", lr=1e-2, momentum=0.9),
    "sm3": OptimizerConfig(name="sm3", lr=1e-1),
    "muon": OptimizerConfig(name="muon", lr=1e-2),
}
MOE = models.reduced_config(models.find_model("moe-tiny"), layers=2, width=16, vocab=67)


def test_only_elementwise_rules_are_updated_by_the_host() -> None:
    on_device = {
        name for name in ("adamw", "sgd", "lion", *RULES) if offload_support.updates_on_device(UpdateRule(name=name))
    }
    assert on_device == set(RULES)


def pages_of(engine: Engine) -> list[list[str]]:
    paged = engine.optimizer.optimizers[1]  # type: ignore[attr-defined]
    assert isinstance(paged, paged_optimizer.PagedOptimizer)
    return [[group.spec.name for group in page.param_groups] for page in paged._pages]


PAGED = (
    *((name, layout) for name in RULES for layout in ("offload=optimizer", "accumulate=2,offload=params")),
    ("muon", "accumulate=2,offload=disk"),
    ("adafactor", "offload=params+disk"),
)


@pytest.mark.parametrize(("name", "layout"), PAGED)
def test_pages_change_nothing(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    """A page for each parameter group, and gradients that are final and that accumulate."""
    monkeypatch.setattr(paged_optimizer, "PAGE_BYTES", 1)
    plain, away = (engine_away(text, RULES[name]) for text in (layout.partition("offload")[0].rstrip(","), layout))
    assert pages_of(away) == [[name] for name in ("", "embed", "head", *(f"blocks.{n}" for n in range(4)))]
    stepped(plain)
    stepped(away)
    assert largest_error(whole(away.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
    totals = [
        sum(float(state.double().abs().sum()) for state in engine.optimizer.states() if state.dim())
        for engine in (plain, away)
    ]
    assert totals[1] == pytest.approx(totals[0], rel=1e-9)
    away.close()


def fed_in_pages(shape: ModelConfig, layout: str) -> list[dict[str, Tensor]]:
    """On a rank: what each rule makes of the same gradients, in pages of a few parameter groups."""
    paged_optimizer.PAGE_BYTES, before = 20_000, paged_optimizer.PAGE_BYTES
    try:
        return [found.values for found in fed(shape, layout, list(RULES.values()))]
    finally:
        paged_optimizer.PAGE_BYTES = before


@pytest.mark.parametrize(
    ("shape", "layout", "world"),
    [
        (SHAPE, "dp=2,zero=0", 2),
        (SHAPE, "dp=2,zero=1,accumulate=2", 2),
        (SHAPE, "dp=2,zero=3", 2),
        (SHAPE, "tp=2,pp=2,accumulate=2", 4),
        (SHAPE, "dp=2,tp=2,zero=2", 4),
        (MOE, "dp=2,ep=2,zero=1,accumulate=2", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_statistics_that_span_ranks_stay_right(pool: RankPool, shape: ModelConfig, layout: str, world: int) -> None:
    """Norms, rows and columns, and gathered matrices: fed the same gradients, equal to one device without offload."""
    truths = fed_in_pages(shape, "dp=1")
    for found in pool.run(fed_in_pages, world, shape, f"{layout},offload=optimizer"):
        for name, values, truth in zip(RULES, found, truths, strict=True):
            assert largest_error(values, truth) <= 1e-10, name


@pytest.mark.parametrize("layout", ["dp=2,zero=1,offload=optimizer", "dp=2,zero=3,accumulate=2,offload=params"])
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_collectives_are_counted_page_by_page(pool: RankPool, name: str, layout: str) -> None:
    collective_cost_check.check(pool, tiny("llama", vocab=67, max_seq_len=64), layout, rule=RULES[name])


# -- what crosses, and what is held -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["offload=optimizer", "accumulate=2,offload=optimizer", "accumulate=2,offload=params"]
)
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_copied_states_and_gradients_equal_the_cost(name: str, layout: str) -> None:
    engine = stepped(engine_away(layout, RULES[name], host_share=0.5), 1)
    engine.drain()
    before = link_of(engine).bytes_moved.copy()
    stepped(engine, 1)
    engine.drain()
    moved: Counter[str] = Counter()
    for (_, kind), size in (link_of(engine).bytes_moved - before).items():
        moved[kind] += size
    expected = engine.host_transfer_bytes()
    assert moved == Counter({kind: size for kind, size in expected.items() if size})
    assert expected["states"] > 0


@pytest.mark.parametrize("name", ["sm3", "muon"])
def test_state_bytes_on_host_and_disk_equal_the_cost(tmp_path: Path, name: str) -> None:
    for kind in ("optimizer", "disk"):
        engine = stepped(engine_away(f"accumulate=2,offload={kind}", RULES[name], disk_dir=str(tmp_path)), 1)
        engine.drain()
        states = sum(state.nbytes for state in engine.optimizer.states() if state.dim())
        masters = [
            group.offloaded.states.master for group in engine.parallel.sharded_model.param_groups if group.offloaded
        ]
        held = states + sum(master.numel() * 8 for master in masters)
        found = step_comm_volume.offloaded_bytes(engine)
        assert found == {"host": held if kind == "optimizer" else 0, "disk": 2 * held if kind == "disk" else 0}
        if kind == "disk":
            assert found["disk"] == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            assert not any(master.untyped_storage().nbytes() for master in masters)
        engine.close()


def test_three_pages_are_on_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more, and states are back on the host after the step."""
    monkeypatch.setattr(paged_optimizer, "PAGE_BYTES", 1)
    engine = stepped(engine_away("accumulate=2,offload=optimizer", RULES["muon"]), 1)
    engine.drain()
    live: list[int] = []
    there: set[int] = set()
    fetch, finish = paged_optimizer._StatePage.fetch, paged_optimizer._StatePage._finish

    def counted_fetch(page: Any) -> None:
        there.add(id(page))
        live.append(len(there))
        fetch(page)

    def counted_finish(page: Any, *args: Any) -> None:
        finish(page, *args)
        there.discard(id(page))

    monkeypatch.setattr(paged_optimizer._StatePage, "fetch", counted_fetch)
    monkeypatch.setattr(paged_optimizer._StatePage, "_finish", counted_finish)
    stepped(engine, 2)
    engine.drain()
    assert len(live) == 2 * len(pages_of(engine))
    assert max(live) <= offload_cost.NUM_PAGES
    assert not there


@pytest.mark.parametrize(
    ("sizes", "pages", "largest"),
    [
        ([], [], 0),
        ([7], [slice(0, 1)], 7),
        ([9, 2, 2, 2, 2], [slice(0, 1), slice(1, 3), slice(3, 5)], 17),
        ([2, 3, 3, 3], [slice(0, 2), slice(2, 3), slice(3, 4)], 11),
        ([1] * 25, [slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 20), slice(20, 25)], 15),
    ],
)
def test_pages_join_neighbours_up_to_their_size(sizes: list[int], pages: list[slice], largest: int) -> None:
    assert offload_cost.split_into_pages(sizes, 5) == pages
    assert offload_cost.pages_on_device(sizes, 5) == largest


# -- averages, steps without targets, failures ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["optimizer", "params"])
def test_the_average_follows_the_paged_weights(kind: str) -> None:
    rule = OptimizerConfig(name="lamb", lr=1e-2, ema=0.8)
    plain, away = engine_away("", rule), engine_away(f"offload={kind}", rule, host_share=0.5)
    nothing = batch_of(SHAPE, 4, seed=7)
    nothing["targets"].fill_(-100)
    for engine in (plain, away):
        stepped(engine, 2)
        assert engine.step(nothing).skipped
        stepped(engine, 1)
        engine.drain()
    assert plain.ema is not None
    assert away.ema is not None
    for there, here in zip(away.ema.states(), plain.ema.states(), strict=True):
        torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)
    losses = [engine.evaluate(engine.microbatches(batch_of(SHAPE, 4, seed=9))) for engine in (plain, away)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_a_write_that_fails_leaves_the_previous_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_optimizer, "PAGE_BYTES", 1)
    engine = stepped(engine_away("offload=disk", RULES["muon"], disk_dir=str(tmp_path)), 1)
    engine.drain()
    before = {name: value.clone() for name, value in whole(engine.parallel, "master").items()}
    stores = [group.offloaded.states.store for group in engine.parallel.sharded_model.param_groups if group.offloaded]
    save, count = DiskStore.save, [0]

    def third_fails(store: DiskStore, tensors: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise OSError(28, os.strerror(28))
        save(store, tensors)

    monkeypatch.setattr(DiskStore, "save", third_fails)
    with pytest.raises(RuntimeError, match=r"the update.* failed on the host"):
        stepped(engine, 2)
    assert all(store is not None and store.latest == store.committed for store in stores)
    first = torch.empty(SHAPE.width, dtype=torch.float64)
    assert stores[0] is not None
    stores[0].load([first])
    assert torch.equal(first, before["norm.weight"])
    engine.close()
