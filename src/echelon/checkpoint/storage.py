"""Where checkpoints lie: a folder of this machine, or any address that fsspec knows (`s3://…`, `memory://…`).

[Note: when a checkpoint exists]

On a local disk everything is written into `.writing-step-00000100`, flushed to the disk, and the folder is renamed: one
move that happens or does not. An object store has no such move; there the index is written last. In both, a folder
`step-00000100` with an index is a checkpoint, and nothing else is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from echelon.checkpoint.index import DIGEST, INDEX, CheckpointError
from echelon.checkpoint.through import CHUNK, Buffer, Until, there_already, write_through
from echelon.faults.inject import on_write

NAME = re.compile(r"step-(\d{8,})")
WRITING = ".writing-"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


class Storage(Protocol):
    """All that is asked of a place. Errors of the system come as CheckpointError with the path."""

    address: str

    def begin(self, step: int) -> None:
        """One rank: an empty place for a step's files. What an earlier attempt left anywhere is removed."""
        ...

    def write(self, step: int, name: str, file: Buffer, until: Until = there_already) -> None:
        """A whole file, on the disk when this returns; `until` waits for its first so many bytes."""
        ...

    def commit(self, step: int) -> None:
        """One rank, when all files but the index are there and the index is: the checkpoint exists."""
        ...

    def abandon(self, step: int) -> None:
        """What was written of a step is removed."""
        ...

    def steps(self) -> list[int]:
        """Of all checkpoints, in order."""
        ...

    def remove(self, step: int) -> None: ...

    def size(self, step: int, name: str) -> int | None:
        """Of a file in bytes; none where it is not there."""
        ...

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """(first byte, number) one after another."""
        ...

    def set_aside(self, step: int) -> None:
        """It is no checkpoint any more, but what it holds is left to the user."""
        ...


def storage_of(address: str) -> Storage:
    if "://" in address and not address.startswith("file://"):
        return Remote(address)
    return Local(Path(address.removeprefix("file://")))


def told(error: Exception, path: str, doing: str) -> CheckpointError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return CheckpointError(f"a checkpoint cannot be {doing} ({path}: {reason})")


class Local:
    def __init__(self, folder: Path):
        self.folder, self.address = folder, str(folder)

    def begin(self, step: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for found in self.folder.glob(f"{WRITING}*"):
                shutil.rmtree(found)
            self._writing(step).mkdir()
        except OSError as error:
            raise told(error, self.address, "written") from error

    def write(self, step: int, name: str, file: Buffer, until: Until = there_already) -> None:
        path = self._writing(step) / name
        try:
            with on_write(path):
                write_through(path, file, until)
        except OSError as error:
            raise told(error, str(path), "written") from error

    def commit(self, step: int) -> None:
        try:
            _sync(self._writing(step))
            before = self.folder / f"{WRITING}before-{name_of(step)}"
            if self._at(step).exists():  # the same step again, after the run went back
                self._at(step).rename(before)
            self._writing(step).rename(self._at(step))
            _sync(self.folder)
            shutil.rmtree(before, ignore_errors=True)
        except OSError as error:
            raise told(error, str(self._at(step)), "written") from error

    def abandon(self, step: int) -> None:
        shutil.rmtree(self._writing(step), ignore_errors=True)

    def steps(self) -> list[int]:
        found = []
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in self.folder.iterdir():
                if (match := NAME.fullmatch(path.name)) and (path / INDEX).is_file():
                    found.append(int(match[1]))
        return sorted(found)

    def remove(self, step: int) -> None:
        # First out of sight: a reader never sees half of it.
        gone = self.folder / f"{WRITING}removed-{name_of(step)}"
        try:
            self._at(step).rename(gone)
        except OSError as error:
            raise told(error, str(self._at(step)), "removed") from error
        shutil.rmtree(gone, ignore_errors=True)

    def size(self, step: int, name: str) -> int | None:
        try:
            return (self._at(step) / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise told(error, str(self._at(step) / name), "read") from error

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path, found, at = self._at(step) / name, bytearray(sum(count for _, count in ranges)), 0
        view = memoryview(found)
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                for start, count in ranges:
                    while count:
                        got = os.preadv(file, [view[at : at + min(count, CHUNK)]], start)
                        if not got:
                            raise CheckpointError(f"the checkpoint is damaged ({path} ends too early)")
                        at, start, count = at + got, start + got, count - got
            finally:
                os.close(file)
        except OSError as error:
            raise told(error, str(path), "read") from error
        return found

    def set_aside(self, step: int) -> None:
        aside = self.folder / f"left-{name_of(step)}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self._at(step).rename(aside)
        except OSError as error:
            raise told(error, str(self._at(step)), "set aside") from error

    def _at(self, step: int) -> Path:
        return self.folder / name_of(step)

    def _writing(self, step: int) -> Path:
        return self.folder / f"{WRITING}{name_of(step)}"


def _sync(folder: Path) -> None:
    """A folder's own entries are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Remote:
    """torch brings fsspec along; the package of a protocol (s3fs, gcsfs) is the user's to install."""

    def __init__(self, address: str):
        import fsspec  # type: ignore[import-untyped]

        self.address = address.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"fsspec cannot open this address ({address}: {error})") from error

    def begin(self, step: int) -> None:
        for path in self._folders():
            names = (INDEX, f"{INDEX}.left")
            if NAME.fullmatch(path.rpartition("/")[2]) and not any(self._files.exists(f"{path}/{n}") for n in names):
                self._files.rm(path, recursive=True)
        self.abandon(step)

    def write(self, step: int, name: str, file: Buffer, until: Until = there_already) -> None:
        # The index is what makes it a checkpoint: it gets its name in `commit`.
        path = self._at(step, f"{name}.writing" if name == INDEX else name)
        try:
            until(len(file))
            with self._files.open(path, "wb") as stream:
                stream.write(file)
        except OSError as error:
            raise told(error, path, "written") from error

    def commit(self, step: int) -> None:
        self._files.mv(self._at(step, f"{INDEX}.writing"), self._at(step, INDEX))

    def abandon(self, step: int) -> None:
        if self._files.exists(self._at(step)):
            self._files.rm(self._at(step), recursive=True)

    def steps(self) -> list[int]:
        names = [path.rpartition("/")[2] for path in self._folders() if self._files.exists(f"{path}/{INDEX}")]
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def remove(self, step: int) -> None:
        self._files.rm(self._at(step, INDEX))
        self.abandon(step)

    def size(self, step: int, name: str) -> int | None:
        path = self._at(step, name)
        return int(self._files.size(path)) if self._files.exists(path) else None

    def set_aside(self, step: int) -> None:
        self._files.mv(self._at(step, INDEX), self._at(step, f"{INDEX}.left"))

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path = self._at(step, name)
        try:
            found: list[Any] = self._files.cat_ranges(
                [path] * len(ranges),
                [start for start, _ in ranges],
                [start + count for start, count in ranges],
                on_error="raise",
            )
        except OSError as error:
            raise told(error, path, "read") from error
        whole = bytearray().join(found)
        if len(whole) != sum(count for _, count in ranges):
            raise CheckpointError(f"the checkpoint is damaged ({path} ends too early)")
        return whole

    def _at(self, step: int, name: str = "") -> str:
        return f"{self._root}/{name_of(step)}" + (f"/{name}" if name else "")

    def _folders(self) -> list[str]:
        if not self._files.exists(self._root):
            return []
        self._files.invalidate_cache()
        return [str(path).rstrip("/") for path in self._files.ls(self._root, detail=False)]


def index_files(storage: Storage, step: int) -> tuple[bytearray, bytearray]:
    """The index of a checkpoint and its digest, as they lie there."""
    found = []
    for name in (INDEX, DIGEST):
        size = storage.size(step, name)
        if size is None:
            raise CheckpointError(f"the checkpoint is damaged ({storage.address}/{name_of(step)} has no {name})")
        found.append(storage.read(step, name, [(0, size)]))
    return found[0], found[1]
