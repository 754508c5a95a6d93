"""The copy in the background of training, and direct I/O."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from echelon.checkpoint import direct_io, staging
from echelon.checkpoint.checkpoint_index import PAGE_BYTES
from echelon.checkpoint.direct_io import write_direct
from echelon.checkpoint.staging import HostStaging
from echelon.checkpoint.tensor_slices import LocalSlice
from echelon.checkpoint.training_state import StateItem
from echelon.config.sections import OptimizerConfig
from echelon.training.engine_state import EngineCheckpointer, training_state
from tests.checkpoint.save_and_load_runs import built, stepped


def values_of(engine) -> dict[str, torch.Tensor]:
    return {item.name: item.read().clone() for item in training_state(engine).items()}


@pytest.mark.parametrize("rule", [OptimizerConfig(lr=1e-2), OptimizerConfig(lr=1e-2, ema=0.9)], ids=["adamw", "ema"])
def test_the_next_update_waits_for_the_copy(tmp_path, monkeypatch, rule):
    at_once, released = staging._copy_in_chunks, threading.Event()

    def slowly(to, values):
        released.wait()
        yield from at_once(to, values)

    monkeypatch.setattr(staging, "_copy_in_chunks", slowly)
    engine = built(None, "dp=1", rule)
    saving = EngineCheckpointer(engine, str(tmp_path))
    kept = {}
    for step in (0, 2):  # the second save starts after the first was copied
        stepped(engine, None, step)
        kept[step + 1] = before = values_of(engine)
        saving.save({})
        release = threading.Timer(0.05, released.set)
        release.start()
        if rule.ema:
            with engine.ema_weights():  # it waits too
                assert released.is_set()
        stepped(engine, None, step + 1)
        assert released.is_set(), "the update did not wait for the copy"
        release.join()
        released.clear()
        assert not torch.equal(values_of(engine)["model.weight"], before["model.weight"])
    saving.wait()
    for step, before in kept.items():
        saving.load(step)
        after = values_of(engine)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    saving.close()


def test_an_error_in_the_copy_is_raised(tmp_path, monkeypatch):
    def broken(to, values):
        raise MemoryError("no room")
        yield

    engine = built(None, "dp=1", OptimizerConfig(lr=1e-2))
    saving = EngineCheckpointer(engine, str(tmp_path))
    stepped(engine, None, 0)
    saving.save({})
    saving.wait()
    monkeypatch.setattr(staging, "_copy_in_chunks", broken)
    stepped(engine, None, 1)
    saving.save({})
    stepped(engine, None, 2)
    with pytest.raises(MemoryError, match="no room"):
        saving.wait()
    assert saving.steps() == [1]
    saving.close()


def test_buffers_are_copied_at_once():
    engine = built(None, "dp=1", OptimizerConfig(lr=1e-2))
    stepped(engine, None, 0)
    state = training_state(engine)
    copied = HostStaging(state, torch.device("cpu"))
    where = {region.name: len(copied.header) + region.offset for region in copied.regions}

    def mean() -> torch.Tensor:
        at = where["buffer.norm.running_mean"]
        return copied.memory[at : at + 5 * 8].view(torch.float64).clone()

    copied.snapshot(state, in_background=True)
    before = mean()
    assert torch.equal(before, engine.model.norm.running_mean)
    stepped(engine, None, 1)
    copied.run_background_copies()
    assert torch.equal(before, mean())
    assert not torch.equal(before, engine.model.norm.running_mean)


class Stream:
    """A fake CUDA stream that records its operations."""

    device = None

    def __init__(self, name):
        self.name, self.given = name, []

    def wait_stream(self, other):
        self.given.append(other.name)


class Streams:
    """A fake of torch's streams, with a current one."""

    def __init__(self):
        self.training, self.beside = Stream("training"), Stream("beside")
        self.current = self.training

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, blocking=False):
        return SimpleNamespace(record=lambda stream=None: (stream or self.current).given.append("event"))


@pytest.mark.parametrize("behind", [True, False])
def test_the_copy_stream_waits_for_the_training_stream(monkeypatch, behind):
    """The copy stream waited for itself: the file was written before the training stream's copies had finished."""
    engine = built(None, "dp=1", OptimizerConfig(lr=1e-2))
    state, streams = training_state(engine), Streams()
    copied = HostStaging(state, torch.device("cpu"))
    copied._copy_stream = streams.beside
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    copied.snapshot(state, in_background=behind)
    assert streams.beside.given == ["training", "training", "event"]
    assert not streams.training.given


@pytest.mark.parametrize("size", [3 * PAGE_BYTES, 2 * PAGE_BYTES + 17, 5, 0])
@pytest.mark.parametrize("trouble", ["none", "open", "write", "short"])
def test_direct_io_writes_the_same_bytes(tmp_path, monkeypatch, size, trouble):
    monkeypatch.setattr(direct_io, "MIN_DIRECT_BYTES", 1)
    room = torch.randint(0, 256, (size + PAGE_BYTES,), dtype=torch.uint8)
    start, path = -room.data_ptr() % PAGE_BYTES, tmp_path / "file"
    view = memoryview(room[start : start + size].numpy().data)
    real_open, real_write, direct = os.open, os.write, os.O_DIRECT
    asked, troubled = [], []

    def opened(path, flags, mode=0o777):
        asked.append(bool(flags & direct))
        if trouble == "open" and flags & direct:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, mode)

    def written(file, part):
        if troubled or len(part) < PAGE_BYTES or trouble in ("none", "open"):
            return real_write(file, part)
        troubled.append(trouble)
        if trouble == "write":
            raise OSError(errno.EINVAL, "no")
        path.write_bytes(part[:100])
        os.lseek(file, 100, os.SEEK_SET)
        return 100

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)
    write_direct(path, view)
    assert path.read_bytes() == bytes(view)
    assert asked[0] == (size > 0)


def test_a_full_disk_is_not_mistaken_for_missing_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "MIN_DIRECT_BYTES", 1)

    def full(file, part):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_direct(tmp_path / "file", b"x" * PAGE_BYTES)


def test_a_copy_made_by_read_is_not_stable():
    """Two copies that were not held at once had the same address and were mistaken for the state itself: on a GPU their
    memory was read on another stream, before the kernel that fills it."""
    state = torch.arange(4096.0)
    of = {"state": lambda: state, "copy": lambda: state * 1}
    items = {
        name: StateItem(name, state.dtype, (4096,), LocalSlice.full((4096,)), True, read, state.copy_)
        for name, read in of.items()
    }
    assert staging.is_read_in_place(items["state"])
    assert not staging.is_read_in_place(items["copy"])
