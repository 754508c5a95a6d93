"""Corrupt files, full disks, foreign files: each is reported by name, and the previous checkpoint is unchanged."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_engines import tiny

from echelon.checkpoint.checkpoint_index import CheckpointError, digest_line
from echelon.checkpoint.save import RetentionPolicy
from echelon.checkpoint.storage import WRITING_PREFIX, LocalStorage, open_storage
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_failure import RankError
from echelon.training.engine_state import EngineCheckpointer
from tests.checkpoint.save_and_load_runs import built, run, stepped

SHAPE = tiny(layers=1, vocab=31)
RULE = OptimizerConfig(lr=1e-2)


def trained(folder: Path, *, steps: int = 2, keep: RetentionPolicy | None = None) -> tuple[object, EngineCheckpointer]:
    engine = built(SHAPE, "dp=1", RULE)
    saving = EngineCheckpointer(engine, str(folder), keep=keep)
    for step in range(steps):
        stepped(engine, SHAPE, step)
        saving.save({})
    saving.wait()
    return engine, saving


@pytest.fixture
def saved(tmp_path):
    return tmp_path, *trained(tmp_path)


def refused(folder: Path, match: str, step: int = 2) -> None:
    with pytest.raises(CheckpointError, match=match):
        EngineCheckpointer(built(SHAPE, "dp=1", RULE), str(folder)).load(step)


def test_one_byte_of_any_file(saved):
    """Wherever the byte is: in the tensors, in a header, in the index, in its digest."""
    folder, _, saving = saved
    source = random.Random(0)
    files = sorted((folder / "step-00000002").iterdir())
    assert {file.name for file in files} == {"index.json", "index.sha256", "part-00000.safetensors"}
    for file in files:
        before = file.read_bytes()
        places = [0, len(before) - 1, *(source.randrange(len(before)) for _ in range(6))]
        for place in places:
            changed = bytearray(before)
            changed[place] ^= 1 << source.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match="corrupt") as caught:
                saving.load(2)
            assert file.name in str(caught.value), place
        file.write_bytes(before)
    saving.load(2)


def test_a_changed_byte_is_named_on_another_layout(pool, tmp_path):
    """Every rank reads a part of the file; all of them name the corrupt one."""
    pool.run(run, 2, SHAPE, "dp=2,zero=1", RULE, str(tmp_path), (0, 1), save_at=1)
    file = tmp_path / "step-00000001" / "part-00001.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-9] ^= 4
    file.write_bytes(changed)
    with pytest.raises(RankError, match=r"corrupt.*part-00001\.safetensors.*have changed"):
        pool.run(run, 3, SHAPE, "dp=3,zero=3", RULE, str(tmp_path), (1, 2), resume=True)


def test_truncated_extended_missing_and_foreign_files(saved):
    folder, _, saving = saved
    file = folder / "step-00000002" / "part-00000.safetensors"
    before = file.read_bytes()
    for content in (before[:-5], before + bytes(5)):
        file.write_bytes(content)
        refused(folder, rf"part-00000\.safetensors has {len(content):,} bytes of {len(before):,}")
    file.unlink()
    refused(folder, r"part-00000\.safetensors is missing")
    file.write_bytes(before)

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {folder}/ran",)

    for name in ("data.pkl", ".metadata", "part-00001.safetensors", "index.pt"):
        (file.parent / name).write_bytes(pickle.dumps(Evil()))
    saving.load(2)
    file.write_bytes(pickle.dumps(Evil()))
    refused(folder, r"part-00000\.safetensors")
    assert not (folder / "ran").exists()


def test_missing_and_unexpected_names_are_reported(saved):
    """A renamed key is reported by name; dtypes and shapes are compared."""
    folder, _, _ = saved
    file = folder / "step-00000002" / "index.json"
    whole = json.loads(file.read_text())
    tensors = whole["tensors"]
    tensors["model.head.wait"] = tensors.pop("model.head.weight")
    file.write_text(text := json.dumps(whole))
    (file.parent / "index.sha256").write_text(digest_line(text))
    refused(folder, r"missing: model\.head\.weight \(did you mean model\.head\.wait\?\), unexpected: model\.head\.wait")
    other = r"different: model\.embed\.weight \(checkpoint F64 \[31, 16\], model F64 \[33, 16\]\)"
    with pytest.raises(CheckpointError, match=other):
        EngineCheckpointer(built(tiny(layers=1, vocab=33), "dp=1", RULE), str(folder)).load(1)
    with pytest.raises(CheckpointError, match=r"missing: optimizer\.mean\..*unexpected|missing: average"):
        EngineCheckpointer(built(SHAPE, "dp=1", OptimizerConfig(lr=1e-2, ema=0.9)), str(folder)).load(1)


def test_a_full_disk_is_raised_at_the_next_step(tmp_path, monkeypatch):
    engine, saving = trained(tmp_path, steps=1)
    stepped(engine, SHAPE, 1)

    def full(_file: int, _bytes: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("echelon.checkpoint.storage.os.write", full)
        saving.save({})
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*part-00000.*no space left"):
            saving.wait()
    assert LocalStorage(tmp_path).steps() == [1]
    assert not list(tmp_path.glob(f"{WRITING_PREFIX}*"))
    saving.save({})
    saving.wait()
    assert LocalStorage(tmp_path).steps() == [1, 2]


def test_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system of a size of our own here")
    try:
        with pytest.raises(CheckpointError, match="no space left"):
            trained(small, steps=6, keep=RetentionPolicy(last=0))
        assert LocalStorage(small).steps()
        assert not list(small.glob(f"{WRITING_PREFIX}*"))
        EngineCheckpointer(built(SHAPE, "dp=1", RULE), str(small)).load(LocalStorage(small).steps()[-1])
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_read_only_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        trained(tmp_path / "file", steps=1)
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match="permission denied"):
            trained(tmp_path / "closed", steps=1)


def test_partial_checkpoints_are_ignored_and_removed(tmp_path):
    _, saving = trained(tmp_path, steps=1)
    (tmp_path / f"{WRITING_PREFIX}step-00000007").mkdir()
    (tmp_path / "step-00000009").mkdir()
    assert LocalStorage(tmp_path).steps() == [1]
    saving.save({})
    saving.wait()
    assert not list(tmp_path.glob(f"{WRITING_PREFIX}*"))


def test_retention_policy(tmp_path):
    assert RetentionPolicy(last=2, every=10).expired([5, 10, 15, 20, 25]) == [5, 15]
    assert RetentionPolicy(last=0).expired([1, 2, 3]) == []
    trained(tmp_path, steps=5, keep=RetentionPolicy(last=1, every=2))
    assert LocalStorage(tmp_path).steps() == [2, 4, 5]
    # After a return to the start, the checkpoints of later steps are not newer.
    trained(tmp_path, steps=1, keep=RetentionPolicy(last=1, every=2))
    assert LocalStorage(tmp_path).steps() == [1, 2, 4, 5]


def test_fsspec_storage():
    """Object stores have no rename: the index is written last."""
    import fsspec

    address = "memory://checkpoints"
    engine, saving = trained(address, steps=4, keep=RetentionPolicy(last=2))  # type: ignore[arg-type]
    files = fsspec.filesystem("memory")
    files.pipe("/checkpoints/step-00000008/part-00000.safetensors", b"half of it")
    assert saving.steps() == [3, 4]
    before = [p.detach().clone() for p in engine.model.parameters()]
    stepped(engine, SHAPE, 4)
    loaded = saving.load(4)
    assert loaded.hash == loaded.index.hash
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    saving.save({})
    saving.wait()
    assert not files.exists("/checkpoints/step-00000008")


def test_a_checkpoint_that_was_set_aside_in_an_object_store_is_kept():
    """It counts no longer, but its files are the user's: the next save removes unfinished ones only."""
    import fsspec

    engine, saving = trained("memory://aside", steps=2)  # type: ignore[arg-type]
    saving.set_aside(1)
    assert saving.steps() == [1]
    stepped(engine, SHAPE, 2)
    saving.save({})
    saving.wait()
    assert saving.steps() == [1, 3]
    assert fsspec.filesystem("memory").exists("/aside/step-00000002/part-00000.safetensors")


def test_a_file_of_an_object_store_that_shrinks_while_it_is_read():
    import fsspec

    fsspec.filesystem("memory").pipe("/shrunk/step-00000001/part-00000.safetensors", bytes(16))
    storage = open_storage("memory://shrunk")
    assert storage.read(1, "part-00000.safetensors", [(0, 4), (12, 4)]) == bytes(8)
    with pytest.raises(CheckpointError, match="is truncated"):
        storage.read(1, "part-00000.safetensors", [(0, 4), (12, 8)])


ADDRESSES = ["", "memory://again"]


def address_of(tmp_path: Path, address: str) -> str:
    import fsspec

    if address:
        files = fsspec.filesystem("memory")
        if files.exists("/again"):
            files.rm("/again", recursive=True)
    return address or str(tmp_path)


@pytest.mark.parametrize("address", ADDRESSES, ids=["disk", "fsspec"])
@pytest.mark.parametrize("moment", ["write", "commit"])
def test_a_rewritten_step_survives_until_the_new_one_exists(tmp_path, monkeypatch, address, moment):
    """After a rollback a run rewrites its checkpoint: a failure meanwhile left it without one."""
    where = address_of(tmp_path, address)
    _, saving = trained(where, steps=1, keep=RetentionPolicy(last=1))  # type: ignore[arg-type]
    kind, before = type(saving._storage), saving.load(1).hash

    def full(*_: object) -> None:
        raise CheckpointError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(kind, moment, full)
        saving.save({"spikes": {}})
        with pytest.raises(CheckpointError, match="no room"):
            saving.wait()
    assert saving.steps() == [1]
    assert saving.load(1).hash == before
    for number in range(3):
        saving.save({"number": number})
        saving.wait()
        assert saving.steps() == [1]
        assert saving.load(1).index.metadata["number"] == number


def test_a_kill_between_the_two_renames_of_a_commit(tmp_path, monkeypatch):
    engine, saving = trained(tmp_path, steps=1, keep=RetentionPolicy(last=1))
    before, real = saving.load(1).hash, Path.rename

    def dies(path: Path, target: Path) -> Path:
        if path.name.startswith(WRITING_PREFIX):
            raise OSError(errno.EIO, "killed")
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        saving.save({})
        with pytest.raises(CheckpointError, match="killed"):
            saving.wait()
    assert not (tmp_path / "step-00000001").exists()
    assert LocalStorage(tmp_path).steps() == [1]
    assert saving.load(1).hash == before
    stepped(engine, SHAPE, 1)
    monkeypatch.setattr(LocalStorage, "commit", lambda *_: (_ for _ in ()).throw(CheckpointError("no room")))
    saving.save({})
    with pytest.raises(CheckpointError, match="no room"):
        saving.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("address", ADDRESSES, ids=["disk", "fsspec"])
def test_a_failure_after_the_commit_keeps_the_checkpoint(tmp_path, monkeypatch, address):
    """Old ones are removed when the new one exists; where that failed, or a rank died then, the new one was removed."""
    where = address_of(tmp_path, address)
    engine, saving = trained(where, steps=1, keep=RetentionPolicy(last=1))  # type: ignore[arg-type]
    stepped(engine, SHAPE, 1)
    kind = type(saving._storage)
    real = kind.remove

    def breaks(self: object, step: int) -> None:
        real(self, step)
        raise CheckpointError("the network is gone")

    monkeypatch.setattr(kind, "remove", breaks)
    saving.save({})
    with pytest.raises(CheckpointError, match="network"):
        saving.wait()
    assert saving.steps() == [2]
    saving.load(2)


def test_a_directory_that_only_the_first_node_has(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "begin", lambda *_: None)
    with pytest.raises(
        CheckpointError, match=r"does not exist\); all ranks must see one directory: set checkpoint\.path"
    ):
        trained(tmp_path, steps=1)


def test_files_are_plain_safetensors(saved):
    from safetensors.torch import load_file

    folder, engine, _ = saved
    found = load_file(folder / "step-00000002" / "part-00000.safetensors")
    for name, value in engine.model.named_parameters():
        assert torch.equal(found[f"model.{name}"], value)
