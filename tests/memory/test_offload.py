"""Off the device: what crosses and what is held is what the costs say; what goes wrong is said, and nothing is lost.

That it computes the same is test_transparency_offload.py's business.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from laid_out import batch_of, engine_of, error, float64, largest_error, tiny, whole
from living import LivingBytes
from torch import Tensor, nn

from echelon import models
from echelon.launch.pool import Pool
from echelon.layout.placement import Entry, Unit
from echelon.memory import offload, store
from echelon.memory.activations import Stash
from echelon.memory.link import DOWN, UP, Link, Rooms
from echelon.memory.worker import Worker
from echelon.optim.on_host import OnHost
from echelon.parallel.apply import Options
from echelon.train import issued
from echelon.train.engine import Engine
from echelon.train.sections import OptimizerConfig

ADAMW = OptimizerConfig(lr=1e-2)
SHAPE = tiny(layers=4)


def engine_away(layout: str, rule: OptimizerConfig = ADAMW, **options: Any) -> Engine:
    model = models.build(SHAPE, "meta", dtype=torch.float64)
    engine = Engine(model, layout, rule, clip=0.5, options=float64(**options))
    engine.model.train()
    return engine


class Scaled(nn.Module):
    """Sums of inputs times weights; no product of matrices, which not every CPU does in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(), len(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scaled(layout: str, rule: OptimizerConfig) -> Engine:
    """After three steps."""
    options = Options(compute=torch.bfloat16, master=torch.float32)
    engine = Engine(Scaled(), layout, rule, clip=0.5, options=options)
    for step in range(3):
        engine.step({"x": torch.linspace(-1, 1, 64, dtype=torch.float32).view(2, 4, 8) + step})
    engine.drain()
    return engine


def link_of(engine: Engine) -> Link:
    away = engine.parallel.away
    link = away.host.link if away.host is not None else away.stash.link if away.stash is not None else None
    assert link is not None
    return link


def stepped(engine: Engine, steps: int = 3, rows: int = 4) -> Engine:
    for step in range(steps):
        engine.step(batch_of(SHAPE, rows, seed=step))
    return engine


# -- what crosses, and what is held -----------------------------------------------------------------------------------

STATES = (
    "dp=1,offload=optimizer",
    "dp=1,accumulate=2,offload=optimizer",
    "dp=1,offload=params",
    "dp=1,accumulate=2,recompute=full,offload=params",
)
RANKS = (
    "dp=2,zero=1,accumulate=2,offload=optimizer",
    "dp=2,zero=0,accumulate=2,offload=params",
    "dp=2,zero=3,offload=params",
    "pp=2,accumulate=2,offload=params",
)


def counted(layout: str, share: float) -> tuple[dict[str, int], dict[str, int]]:
    """On a rank: bytes that the second step moved, and what the cost says."""
    engine = stepped(engine_away(layout, host=share), 1)
    engine.drain()
    before = link_of(engine).moved.copy()
    stepped(engine, 1)
    engine.drain()
    moved = link_of(engine).moved - before
    ways = {"gradients": DOWN, "parameters": UP}
    assert set(moved) <= {(way, kind) for kind, way in ways.items()}
    return {kind: moved[way, kind] for kind, way in ways.items()}, engine.crossing()


@pytest.mark.parametrize("layout", STATES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_gradients_and_parameters_cross_as_the_cost_says(layout: str, share: float) -> None:
    moved, said = counted(layout, share)
    assert moved == said
    assert all(said.values())


@pytest.mark.parametrize("layout", RANKS)
def test_ranks_move_what_the_cost_says(pool: Pool, layout: str) -> None:
    for moved, said in pool.run(counted, 2, layout, 0.5):
        assert moved == said


def test_a_gradient_that_comes_once_a_step_crosses_in_its_own_type() -> None:
    engine = scaled("offload=optimizer", ADAMW)
    size = sum(unit.numel for unit in engine.parallel.placement.units)
    assert link_of(engine).moved == {(DOWN, "gradients"): 3 * 2 * size, (UP, "parameters"): 3 * 2 * size}
    assert engine.crossing() == {"gradients": 2 * size, "parameters": 2 * size}


@pytest.mark.parametrize(("recompute", "accumulate"), [("full", 1), ("full", 2), ("none", 1)])
def test_activations_of_all_layers_but_the_last_cross_both_ways(recompute: str, accumulate: int) -> None:
    engine = stepped(engine_away(f"dp=1,accumulate={accumulate},recompute={recompute},offload=activations"), 1)
    moved = dict(link_of(engine).moved)
    assert moved[DOWN, "activations"] == moved[UP, "activations"] > 0
    if recompute == "full":  # a layer keeps its input; what layers share (positions) is small
        entry = 4 * 9 * SHAPE.width * 8
        assert moved[DOWN, "activations"] == (SHAPE.layers - 1) * entry
    stash = engine.parallel.away.stash
    assert stash is not None
    held = stash.pool.nbytes
    stepped(engine, 2)
    assert stash.pool.nbytes == held <= moved[DOWN, "activations"]  # used again from step to step


def test_the_device_holds_two_layers_of_activations() -> None:
    def peak(layers: int, offloaded: bool) -> int:
        shape = tiny(layers=layers, vocab=16)
        layout = "dp=1,offload=activations" if offloaded else "dp=1"
        engine = engine_of(shape, layout)
        engine.step(batch_of(shape, 2, length=32))
        stash = engine.parallel.away.stash
        with LivingBytes() as living:  # memory on the host was made in the first step
            engine.step(batch_of(shape, 2, length=32))
        return living.peak - (stash.pool.nbytes if stash is not None and stash.pool.nbytes > living.peak else 0)

    grown = [peak(8, offloaded) - peak(4, offloaded) for offloaded in (False, True)]
    assert grown[1] < 0.1 * grown[0], grown


def test_a_storage_goes_once_and_what_is_small_or_a_parameter_stays() -> None:
    stash = Stash(Link(torch.device("cpu")), last_stays=False)
    weight = torch.randn(64, 64, requires_grad=True)
    stash.leave([weight])

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ weight
            return (y.view(-1) * y.flatten()).view(x.shape) * x[:, :1].sum().tanh()

    model = nn.Sequential(Layer())
    x = torch.randn(64, 64, requires_grad=True)
    truth = torch.autograd.grad(model(x).sum(), (x, weight))
    stash.apply(model, ["0"])
    out = model(x)
    # x, y and what y times y made; neither the weight nor numbers.
    assert stash.link.moved == {(DOWN, "activations"): 3 * x.nbytes}
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), (x, weight)), truth, strict=True))
    assert stash.link.moved[UP, "activations"] == 3 * x.nbytes
    with torch.no_grad():
        model(x)
    assert stash.link.moved[DOWN, "activations"] == 3 * x.nbytes


def test_states_are_held_where_the_cost_says(tmp_path: Path) -> None:
    for layout, place in (("offload=optimizer", "host"), ("offload=params", "host"), ("offload=disk", "disk")):
        engine = stepped(engine_away(f"dp=1,accumulate=2,{layout}", disk=str(tmp_path)), 1)
        engine.drain()
        said = issued.held_away(engine)
        hosts = [unit.host for unit in engine.parallel.flat.units if unit.host is not None]
        states = [state for state in engine.optimizer.states() if state.dim()]
        held = sum(state.nbytes for state in states) + sum(host.tensor.numel() * 8 for host in hosts)
        if place == "disk":
            assert said["disk"] == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            assert said["disk"] == 2 * held
            assert not any(host.tensor.untyped_storage().nbytes() for host in hosts)
        held += sum(tensor.nbytes for host in hosts for tensor in (host.own, host.there) if tensor is not None)
        assert said["host"] == (held if place == "host" else 0)


def unit(name: str, numel: int, *, kept: bool = False) -> Unit:
    return Unit(name=name, entries=(Entry(name=name, names=(name,), shape=(numel,)),), shards=1, kept=kept)


def test_the_last_layers_leave_first_and_what_is_needed_at_once_leaves_last() -> None:
    units = [unit("", 1, kept=True), unit("a", 10), unit("b", 10), unit("c", 10), unit("head", 9, kept=True)]
    assert offload.chosen(units, 0.0) == frozenset()
    assert offload.chosen(units, 0.25) == {"c"}
    assert offload.chosen(units, 0.5) == {"b", "c"}
    assert offload.chosen(units, 0.8) == {"a", "b", "c", "head"}
    assert offload.chosen(units, 1.0) == {"", "a", "b", "c", "head"}


def test_as_few_leave_as_must() -> None:
    units = [unit(str(index), 10) for index in range(10)]
    assert offload.least_share(units, room=1600, stay=16, leave=4) == 0.0
    assert offload.least_share(units, room=1000, stay=16, leave=4) == pytest.approx(0.5)
    assert offload.least_share(units, room=100, stay=16, leave=4) == 1.0


def test_what_a_plan_is_told_moves() -> None:
    numbers = {"updated": 10.0, "parameters": 20.0, "activations": 7.0, "accumulate": 3} | {
        "compute_bytes": 2,
        "gradient_bytes": 4,
    }
    optimizer = offload.moved("optimizer", **numbers)
    assert (optimizer.link, optimizer.updated, optimizer.disk) == (60.0, 10.0, 0.0)
    assert offload.moved("optimizer", share=0.5, **numbers).link == 30.0
    assert offload.moved("params", **numbers).link == 3 * 10 * (4 + 2 * 2)
    assert offload.moved("activations", **numbers) == offload.Moved(link=42.0)
    assert offload.moved("params+disk", **numbers).disk == 2 * 12 * 10 + 7 * 2 * 10


# -- shares, and readers ----------------------------------------------------------------------------------------------


def trained(layout: str, share: float) -> dict[str, Tensor]:
    return whole(stepped(engine_away(layout, host=share)).parallel, "master")


@pytest.mark.parametrize("layout", ["dp=2,zero=1,accumulate=2", "dp=2,zero=3", "tp=2", "pp=2,accumulate=2"])
@pytest.mark.parametrize("kind", ["optimizer", "params+activations", "disk"])
def test_a_part_of_the_states_may_stay(pool: Pool, layout: str, kind: str) -> None:
    truth = pool.run(trained, 2, layout, 0.0)[0]
    found = pool.run(trained, 2, f"{layout},offload={kind}", 0.5)[0]
    assert largest_error(found, truth) <= 1e-10


@pytest.mark.parametrize("layout", ["dp=1", "dp=1,accumulate=2"])
@pytest.mark.parametrize("kind", ["optimizer", "params", "disk", "params+disk"])
def test_everybody_who_reads_sees_a_finished_update(layout: str, kind: str) -> None:
    """Moments, master values, losses of an evaluation and logits, each right after a step."""
    plain, away = engine_away(layout), engine_away(f"{layout},offload={kind}")
    batch = batch_of(SHAPE, 4, seed=9)
    for step in range(2):
        for engine in (plain, away):
            engine.step(batch_of(SHAPE, 4, seed=step))
        assert largest_error(whole(away.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
        assert largest_error(whole(away.parallel), whole(plain.parallel)) <= 1e-10
        totals = [
            sum(float(state.double().abs().sum()) for state in e.optimizer.states() if state.dim())
            for e in (plain, away)
        ]
        assert totals[1] == pytest.approx(totals[0], rel=1e-12)
        losses = [engine.evaluate(engine.microbatches(batch)) for engine in (plain, away)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        said = []
        for engine in (plain, away):
            with engine.outside_gathered():
                said.append(engine.logits(batch["tokens"][:1], SHAPE.vocab))
        assert error(said[1], said[0]) <= 1e-10


def test_a_step_without_a_target_changes_nothing() -> None:
    engine = stepped(engine_away("offload=optimizer"), 1)
    before = {name: value.clone() for name, value in whole(engine.parallel, "master").items()}
    nothing = batch_of(SHAPE, 4)
    nothing["targets"].fill_(-100)
    assert engine.step(nothing).skipped
    assert largest_error(whole(engine.parallel, "master"), before) == 0.0


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_short_types_on_the_host_are_those_of_the_device(states: str) -> None:
    """float32 masters beside bfloat16 parameters: in two halves on the device, in one piece on the host."""
    rule = OptimizerConfig(lr=1e-2, states=states)
    found = [whole(scaled(layout, rule).parallel, "master") for layout in ("dp=1", "dp=1,offload=optimizer")]
    assert largest_error(found[1], found[0]) < 2e-3


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_on_the_host_is_raised_where_the_unit_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stepped(engine_away("offload=optimizer"), 1)
    engine.drain()
    there = engine.optimizer._there  # type: ignore[attr-defined]
    assert isinstance(there, OnHost)

    def broken(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(there._updates[4], "step", broken)
    with pytest.raises(RuntimeError, match=r"the update of blocks\.1 failed on the host: no more"):
        stepped(engine, 2)
    with pytest.raises(RuntimeError, match="failed on the host"):
        engine.drain()
    with pytest.raises(RuntimeError, match="failed on the host"):
        whole(engine.parallel, "master")


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_free", lambda _: 1000)
    with pytest.raises(ValueError, match=r"the disk is full .*bytes needed, 1,000 free.*memory\.disk"):
        engine_away("offload=disk", disk=str(tmp_path))
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"the disk is full .*states\.0: [\d,]+ bytes needed, [\d,]+ free"):
        engine_away("offload=disk", disk=str(tmp_path))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["disk", "params+disk"])
@pytest.mark.parametrize("fails", ["full", "short"])
def test_a_disk_that_fills_up_leaves_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fails: str
) -> None:
    engine = stepped(engine_away(f"offload={kind}", disk=str(tmp_path)), 2)
    truth = [value.clone() for value in masters(engine)]
    write, calls = os.pwrite, []

    def failing(*args: Any) -> int:
        calls.append(args)
        if len(calls) < 5:
            return write(*args)
        if fails == "short":
            return 0
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(ValueError, match=r"failed on the host.*rank0.*"):
        stepped(engine, 2)
    monkeypatch.undo()
    for unit, value in zip(engine.parallel.flat.units, truth, strict=True):
        assert unit.host is not None
        assert torch.equal(unit.host.loaded()[0], value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    del engine, unit
    gc.collect()
    assert all(path.exists() for path in files)  # whoever wants what they hold finds it


def masters(engine: Engine) -> list[Tensor]:
    return [unit.master.values() for unit in engine.parallel.flat.units]


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    engine = stepped(engine_away("offload=disk", disk=str(tmp_path)), 2)
    engine.drain()
    for path in tmp_path.rglob("blocks.2.states.*"):
        os.truncate(path, 800)
    with pytest.raises(ValueError, match=r"shorter than what was written .*blocks\.2\.states\.\d: 800 bytes of"):
        stepped(engine, 2)


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, views, at: pread(file, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, view, at: pwrite(file, view[:999], at))
    away, plain = engine_away("offload=disk", disk=str(tmp_path)), engine_away("")
    assert largest_error(*(whole(stepped(engine).parallel, "master") for engine in (away, plain))) == 0.0


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ("pp=2,schedule=2bw,accumulate=2,offload=optimizer", "older versions of the weights"),
        ("offload=optimzer", "not a legal value"),
    ],
)
def test_what_cannot_be_is_refused(layout: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Engine(models.build(SHAPE, "meta"), layout)


def test_an_own_loop_has_its_own_update() -> None:
    from echelon.train.wrap import wrap

    with pytest.raises(ValueError, match="yours is in your own loop"):
        wrap(models.build(SHAPE, "cpu"), "offload=optimizer")


# -- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["optimizer", "params", "activations", "params+activations+disk"])
@pytest.mark.parametrize("closed", [True, False])
def test_no_thread_and_no_file_is_left_when_an_engine_goes(tmp_path: Path, kind: str, closed: bool) -> None:
    before = set(threading.enumerate())
    folder = tmp_path / "files"
    engine = stepped(engine_away(f"offload={kind}", disk=str(folder)))
    gone = weakref.ref(engine)
    if closed:
        engine.drain()
        engine.close()
    del engine
    gc.collect()
    assert gone() is None
    # A step's update may have been under way: when it is through, its threads and files go too.
    until = time.monotonic() + 5
    while (set(threading.enumerate()) - before or folder.exists()) and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert not folder.exists()


def test_a_worker_does_its_jobs_in_order_and_none_after_an_error() -> None:
    worker, done = Worker("test"), []
    first = worker.give("the first", lambda: done.append(1))
    second = worker.give("the second", lambda: done.append(1 // 0))
    third = worker.give("the third", lambda: done.append(3))
    first.wait()
    for turn, what in ((second, "the second"), (third, "the third")):
        with pytest.raises(RuntimeError, match=f"{what} failed on the host: integer division"):
            turn.wait()
    worker.stop()
    assert done == [1]


def test_rooms_are_used_in_turn() -> None:
    rooms = Rooms(Link(torch.device("cpu")), 2, 64)
    first, second = rooms.take(), rooms.take()
    assert rooms.take_if_free() is None
    assert first.of(8, torch.float64).shape == (8,)
    rooms.give_back(second)
    assert rooms.take_if_free() is second
