"""Off the device: what goes wrong is said and loses nothing, and nothing is left behind."""

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
from cpu_clock import ALWAYS
from offload_engines import SHAPE, engine_away, stepped
from tiny_engines import largest_error, whole
from torch import Tensor

from echelon import models
from echelon.memory.offload import disk_store
from echelon.memory.offload.host_transfer import HostBufferQueue, HostLink
from echelon.memory.offload.host_worker import HostWorker
from echelon.optim.host_optimizer import HostOptimizer
from echelon.parallel.dp import offload_policy
from echelon.training.engine import Engine

# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_on_the_host_is_raised_where_the_group_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stepped(engine_away("offload=optimizer"), 1)
    engine.drain()
    there = engine.optimizer.optimizers[1]  # type: ignore[attr-defined]
    assert isinstance(there, HostOptimizer)

    def broken(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(there._optimizers[4], "step", broken)
    with pytest.raises(RuntimeError, match=r"the update of blocks\.1 failed on the host: no more"):
        stepped(engine, 2)
    with pytest.raises(RuntimeError, match="failed on the host"):
        engine.drain()
    with pytest.raises(RuntimeError, match="failed on the host"):
        whole(engine.parallel, "master")


def test_a_disk_that_is_too_small_fails_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"the disk is full .*bytes needed, 1,000 free.*memory\.disk"):
        engine_away("offload=disk", disk_dir=str(tmp_path))
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"the disk is full .*states\.0: [\d,]+ bytes needed, [\d,]+ free"):
        engine_away("offload=disk", disk_dir=str(tmp_path))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails is ended at once: what it had reserved stayed, and there was less room for the next run."""
    monkeypatch.setattr(disk_store, "_free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match="the disk is full") as held:
        engine_away("offload=disk", disk_dir=str(tmp_path))
    assert held.tb is not None  # and with it everything that was made
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_not_reported_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", too_long)
    with pytest.raises(ValueError, match=r"exceeds a limit .*file too large.*ulimit -f"):
        engine_away("offload=disk", disk_dir=str(tmp_path))


def test_reclaimable_page_cache_counts_as_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's use counts the files that it has read: where those had filled it, every offload was refused."""
    for name, text in (("max", "1000000"), ("current", "990000"), ("stat", "anon 1000\ninactive_file 900000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(offload_policy, "CGROUP_ROOT", tmp_path)
    assert offload_policy.available_host_bytes() == 910000


def test_a_host_that_is_too_small_fails_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offload_policy.available_host_bytes() > 0
    monkeypatch.setattr(offload_policy, "available_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"the host cannot hold .*GiB a rank, 0\.0 available.*\+disk"):
        engine_away("offload=optimizer")
    engine_away("offload=activations")


@pytest.mark.parametrize("kind", ["disk", "params+disk"])
@pytest.mark.parametrize("fails", ["full", "short"])
def test_a_disk_that_fills_up_leaves_the_previous_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fails: str
) -> None:
    engine = stepped(engine_away(f"offload={kind}", disk_dir=str(tmp_path)), 2)
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
    for unit, value in zip(engine.parallel.sharded_model.param_groups, truth, strict=True):
        assert unit.offloaded is not None
        assert torch.equal(unit.offloaded.states.read()[0], value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    del engine, unit
    gc.collect()
    assert all(path.exists() for path in files)  # whoever wants what they hold finds it


def masters(engine: Engine) -> list[Tensor]:
    return [unit.master.values() for unit in engine.parallel.sharded_model.param_groups]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    engine = stepped(engine_away("offload=disk", disk_dir=str(tmp_path)), 2)
    engine.drain()
    for path in tmp_path.rglob("blocks.2.states.*"):
        os.truncate(path, 800)
    with pytest.raises(ValueError, match=r"is truncated .*blocks\.2\.states\.\d: 800 bytes of"):
        stepped(engine, 2)


def test_short_reads_and_writes_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, views, at: pread(file, [views[0][:1000]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, view, at: pwrite(file, view[:999], at))
    away, plain = engine_away("offload=disk", disk_dir=str(tmp_path)), engine_away("")
    assert largest_error(*(whole(stepped(engine).parallel, "master") for engine in (away, plain))) == 0.0


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        ("pp=2,schedule=2bw,accumulate=2,offload=optimizer", "older weights are in use"),
        ("offload=optimzer", "not a legal value"),
    ],
)
def test_incompatible_layouts_are_refused(layout: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Engine(models.build(SHAPE, "meta"), layout)


def test_wrap_refuses_offload() -> None:
    from echelon.training.wrap import wrap

    with pytest.raises(ValueError, match="offload requires the engine's optimizer"):
        wrap(models.build(SHAPE, "cpu"), "offload=optimizer")


# -- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["optimizer", "params", "activations", "params+activations+disk"])
@pytest.mark.parametrize("closed", [True, False])
def test_no_thread_and_no_file_survives_an_engine(tmp_path: Path, kind: str, closed: bool) -> None:
    before = set(threading.enumerate())
    folder = tmp_path / "files"
    engine = stepped(engine_away(f"offload={kind}", disk_dir=str(folder)))
    gone = weakref.ref(engine)
    if closed:
        engine.drain()
        engine.close()
    del engine
    gc.collect()
    assert gone() is None
    # A step's update may have been under way: when it is through, its threads and files go too.
    until = time.monotonic() + ALWAYS
    while (set(threading.enumerate()) - before or folder.exists()) and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert not folder.exists()


def test_a_worker_runs_jobs_in_order_and_none_after_an_error() -> None:
    worker, done = HostWorker("test"), []
    first = worker.submit("the first", lambda: done.append(1))
    second = worker.submit("the second", lambda: done.append(1 // 0))
    third = worker.submit("the third", lambda: done.append(3))
    first.wait()
    for turn, what in ((second, "the second"), (third, "the third")):
        with pytest.raises(RuntimeError, match=f"{what} failed on the host: integer division"):
            turn.wait()
    worker.stop()
    assert done == [1]


def test_host_buffers_are_reused() -> None:
    rooms = HostBufferQueue(HostLink(torch.device("cpu")), 2, 64)
    first, second = rooms.acquire(), rooms.acquire()
    assert rooms.try_acquire() is None
    assert first.view(8, torch.float64).shape == (8,)
    rooms.release(second)
    assert rooms.try_acquire() is second


def test_saves_before_a_commit_leave_the_committed_states(tmp_path):
    """Two updates of one step, of which the second fails: both are undone."""
    store, states = disk_store.DiskStore(tmp_path / "states"), torch.zeros(8)
    store.save([torch.ones(8)])
    store.commit()
    for value in (2.0, 3.0):
        store.save([torch.full((8,), value)])
    store.load([states])
    assert states.tolist() == [3.0] * 8
    store.roll_back()
    store.load([states])
    assert states.tolist() == [1.0] * 8
