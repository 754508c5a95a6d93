"""Where checkpoints lie: a folder of this machine, or any address that fsspec knows (`s3://…`, `memory://…`).

[Note: when a checkpoint exists]

On a local disk everything is written into `.writing-step-00000100`, flushed to the disk, and the folder is renamed: one
move that happens or does not. An object store has no such move; there the index is written last. In both, a folder
`step-00000100` with an index is a checkpoint, and nothing else is.

A run that went back writes the same step again, and the checkpoint before it lasts until the new one exists. On a disk
it is moved to `.before-step-00000100`, where it counts for as long as no other has its place. In an object store the
new one is written to `step-00000100.again`, or from there back; either name counts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from echelon.checkpoint.checkpoint_index import DIGEST, INDEX, CheckpointError
from echelon.checkpoint.direct_io import CHUNK, Buffer, Until, there_already, write_through
from echelon.faults.injector import on_write

NAME = re.compile(r"step-(\d{8,})")
WRITING, BEFORE = ".writing-", ".before-"
AGAIN = ".again"
_ROOM = "; make room there, keep fewer (checkpoint.keep), or set checkpoint.path. Those before it are as they were"
_CLOSED = "; set checkpoint.path to a folder that can be written"
REMEDIES = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EACCES: _CLOSED, errno.EPERM: _CLOSED, errno.EROFS: _CLOSED}


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
    remedy = REMEDIES.get(getattr(error, "errno", None) or 0, "") if doing == "written" else ""
    return CheckpointError(f"a checkpoint cannot be {doing} ({path}: {reason}){remedy}")


class Local:
    def __init__(self, folder: Path):
        self.folder, self.address = folder, str(folder)

    def begin(self, step: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A kill came between the two moves of `commit`, or behind them.
            for found in self.folder.glob(f"{BEFORE}*"):
                place = self.folder / found.name.removeprefix(BEFORE)
                shutil.rmtree(found) if place.exists() else found.rename(place)
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
        except FileNotFoundError as error:
            raise CheckpointError(
                f"a checkpoint cannot be written ({path.parent} is not there); all ranks must see one folder: set "
                "checkpoint.path to one on a disk that all machines share, or to an address such as s3://..."
            ) from error
        except OSError as error:
            raise told(error, str(path), "written") from error

    def commit(self, step: int) -> None:
        try:
            _sync(self._writing(step))
            if self._place(step).exists():  # the same step again, after the run went back
                self._place(step).rename(self._before(step))
            self._writing(step).rename(self._place(step))
            _sync(self.folder)
            shutil.rmtree(self._before(step), ignore_errors=True)
        except OSError as error:
            raise told(error, str(self._place(step)), "written") from error

    def abandon(self, step: int) -> None:
        shutil.rmtree(self._writing(step), ignore_errors=True)

    def steps(self) -> list[int]:
        try:
            names = {path.name.removeprefix(BEFORE) for path in self.folder.iterdir() if (path / INDEX).is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise told(error, self.address, "looked for") from error
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

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
        """Where a checkpoint is."""
        place, before = self._place(step), self._before(step)
        return before if before.exists() and not place.exists() else place

    def _place(self, step: int) -> Path:
        return self.folder / name_of(step)

    def _before(self, step: int) -> Path:
        return self.folder / f"{BEFORE}{name_of(step)}"

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
        with _told(self.address, "written"):
            for path in self._folders():
                names = (INDEX, f"{INDEX}.left")
                if _step_of(path) is not None and not any(self._files.exists(f"{path}/{name}") for name in names):
                    self._files.rm(path, recursive=True)
        self.abandon(step)

    def write(self, step: int, name: str, file: Buffer, until: Until = there_already) -> None:
        # The index is what makes it a checkpoint: it gets its name in `commit`.
        path = f"{self._writing(step)}/{name}" + (".writing" if name == INDEX else "")
        until(len(file))
        with _told(path, "written"), self._files.open(path, "wb") as stream:
            stream.write(file)

    def commit(self, step: int) -> None:
        place = self._writing(step)
        before = next((path for path in self._places(step) if path != place and self._has_index(path)), None)
        with _told(place, "written"):
            self._files.mv(f"{place}/{INDEX}.writing", f"{place}/{INDEX}")
        if before is not None:
            self._remove(before)

    def abandon(self, step: int) -> None:
        place = self._writing(step)
        with _told(place, "removed"):
            if self._files.exists(place):
                self._files.rm(place, recursive=True)

    def steps(self) -> list[int]:
        with _told(self.address, "looked for"):
            found = {_step_of(path) for path in self._folders() if self._has_index(path)}
        return sorted(step for step in found if step is not None)

    def remove(self, step: int) -> None:
        self._remove(self._at(step))

    def _remove(self, place: str) -> None:
        with _told(place, "removed"):
            self._files.rm(f"{place}/{INDEX}")
            self._files.rm(place, recursive=True)

    def size(self, step: int, name: str) -> int | None:
        path = f"{self._at(step)}/{name}"
        with _told(path, "read"):
            return int(self._files.size(path)) if self._files.exists(path) else None

    def set_aside(self, step: int) -> None:
        place = self._at(step)
        with _told(place, "set aside"):
            self._files.mv(f"{place}/{INDEX}", f"{place}/{INDEX}.left")

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path = f"{self._at(step)}/{name}"
        with _told(path, "read"):
            found: list[Any] = self._files.cat_ranges(
                [path] * len(ranges),
                [start for start, _ in ranges],
                [start + count for start, count in ranges],
                on_error="raise",
            )
        whole = bytearray().join(found)
        if len(whole) != sum(count for _, count in ranges):
            raise CheckpointError(f"the checkpoint is damaged ({path} ends too early)")
        return whole

    def _places(self, step: int) -> tuple[str, str]:
        place = f"{self._root}/{name_of(step)}"
        return place, f"{place}{AGAIN}"

    def _at(self, step: int) -> str:
        """Where a checkpoint is."""
        place, again = self._places(step)
        return place if self._has_index(place) or not self._has_index(again) else again

    def _writing(self, step: int) -> str:
        """Where one is written: every rank finds the same, since none appears before all have written."""
        self._files.invalidate_cache()
        place, again = self._places(step)
        return again if self._has_index(place) else place

    def _has_index(self, place: str) -> bool:
        return bool(self._files.exists(f"{place}/{INDEX}"))

    def _folders(self) -> list[str]:
        if not self._files.exists(self._root):
            return []
        self._files.invalidate_cache()
        return [str(path).rstrip("/") for path in self._files.ls(self._root, detail=False)]


def _step_of(path: str) -> int | None:
    match = NAME.fullmatch(path.rpartition("/")[2].removesuffix(AGAIN))
    return int(match[1]) if match else None


@contextmanager
def _told(path: str, doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every protocol has errors of its own
        raise told(error, path, doing) from error


def index_files(storage: Storage, step: int) -> tuple[bytearray, bytearray]:
    """The index of a checkpoint and its digest, as they lie there."""
    found = []
    for name in (INDEX, DIGEST):
        size = storage.size(step, name)
        if size is None:
            raise CheckpointError(f"the checkpoint is damaged ({storage.address}/{name_of(step)} has no {name})")
        found.append(storage.read(step, name, [(0, size)]))
    return found[0], found[1]
