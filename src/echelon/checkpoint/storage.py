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

from echelon.checkpoint.checkpoint_index import DIGEST_FILE, INDEX_FILE, CheckpointError
from echelon.checkpoint.direct_io import WRITE_CHUNK_BYTES, Buffer, WaitForBytes, no_wait, write_direct
from echelon.faults.injector import on_file_write

STEP_DIR_PATTERN = re.compile(r"step-(\d{8,})")
WRITING_PREFIX, PREVIOUS_PREFIX = ".writing-", ".before-"
REWRITE_SUFFIX = ".again"
_FREE_SPACE_REMEDY = (
    "; make room there, keep fewer (checkpoint.keep), or set checkpoint.path. Those before it are as they were"
)
_PERMISSION_REMEDY = "; set checkpoint.path to a folder that can be written"
REMEDIES = {
    errno.ENOSPC: _FREE_SPACE_REMEDY,
    errno.EDQUOT: _FREE_SPACE_REMEDY,
    errno.EACCES: _PERMISSION_REMEDY,
    errno.EPERM: _PERMISSION_REMEDY,
    errno.EROFS: _PERMISSION_REMEDY,
}


def step_dir_name(step: int) -> str:
    return f"step-{step:08d}"


class Storage(Protocol):
    """All that is asked of a place. Errors of the system come as CheckpointError with the path."""

    address: str

    def begin(self, step: int) -> None:
        """One rank: an empty place for a step's files. What an earlier attempt left anywhere is removed."""
        ...

    def write(self, step: int, name: str, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
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


def open_storage(address: str) -> Storage:
    if "://" in address and not address.startswith("file://"):
        return RemoteStorage(address)
    return LocalStorage(Path(address.removeprefix("file://")))


def storage_error(error: Exception, path: str, action: str) -> CheckpointError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    remedy = REMEDIES.get(getattr(error, "errno", None) or 0, "") if action == "written" else ""
    return CheckpointError(f"a checkpoint cannot be {action} ({path}: {reason}){remedy}")


class LocalStorage:
    def __init__(self, folder: Path):
        self.folder, self.address = folder, str(folder)

    def begin(self, step: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A kill came between the two moves of `commit`, or behind them.
            for found in self.folder.glob(f"{PREVIOUS_PREFIX}*"):
                place = self.folder / found.name.removeprefix(PREVIOUS_PREFIX)
                shutil.rmtree(found) if place.exists() else found.rename(place)
            for found in self.folder.glob(f"{WRITING_PREFIX}*"):
                shutil.rmtree(found)
            self._writing_dir(step).mkdir()
        except OSError as error:
            raise storage_error(error, self.address, "written") from error

    def write(self, step: int, name: str, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
        path = self._writing_dir(step) / name
        try:
            with on_file_write(path):
                write_direct(path, file, wait_for_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"a checkpoint cannot be written ({path.parent} is not there); all ranks must see one folder: set "
                "checkpoint.path to one on a disk that all machines share, or to an address such as s3://..."
            ) from error
        except OSError as error:
            raise storage_error(error, str(path), "written") from error

    def commit(self, step: int) -> None:
        try:
            _fsync_dir(self._writing_dir(step))
            if self._final_dir(step).exists():  # the same step again, after the run went back
                self._final_dir(step).rename(self._previous_dir(step))
            self._writing_dir(step).rename(self._final_dir(step))
            _fsync_dir(self.folder)
            shutil.rmtree(self._previous_dir(step), ignore_errors=True)
        except OSError as error:
            raise storage_error(error, str(self._final_dir(step)), "written") from error

    def abandon(self, step: int) -> None:
        shutil.rmtree(self._writing_dir(step), ignore_errors=True)

    def steps(self) -> list[int]:
        try:
            names = {
                path.name.removeprefix(PREVIOUS_PREFIX)
                for path in self.folder.iterdir()
                if (path / INDEX_FILE).is_file()
            }
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, self.address, "looked for") from error
        return sorted(int(match[1]) for name in names if (match := STEP_DIR_PATTERN.fullmatch(name)))

    def remove(self, step: int) -> None:
        # First out of sight: a reader never sees half of it.
        gone = self.folder / f"{WRITING_PREFIX}removed-{step_dir_name(step)}"
        try:
            self._existing_dir(step).rename(gone)
        except OSError as error:
            raise storage_error(error, str(self._existing_dir(step)), "removed") from error
        shutil.rmtree(gone, ignore_errors=True)

    def size(self, step: int, name: str) -> int | None:
        try:
            return (self._existing_dir(step) / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, str(self._existing_dir(step) / name), "read") from error

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path, found, at = self._existing_dir(step) / name, bytearray(sum(count for _, count in ranges)), 0
        view = memoryview(found)
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                for start, count in ranges:
                    while count:
                        got = os.preadv(file, [view[at : at + min(count, WRITE_CHUNK_BYTES)]], start)
                        if not got:
                            raise CheckpointError(f"the checkpoint is damaged ({path} ends too early)")
                        at, start, count = at + got, start + got, count - got
            finally:
                os.close(file)
        except OSError as error:
            raise storage_error(error, str(path), "read") from error
        return found

    def set_aside(self, step: int) -> None:
        aside = self.folder / f"left-{step_dir_name(step)}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self._existing_dir(step).rename(aside)
        except OSError as error:
            raise storage_error(error, str(self._existing_dir(step)), "set aside") from error

    def _existing_dir(self, step: int) -> Path:
        """Where a checkpoint is."""
        place, before = self._final_dir(step), self._previous_dir(step)
        return before if before.exists() and not place.exists() else place

    def _final_dir(self, step: int) -> Path:
        return self.folder / step_dir_name(step)

    def _previous_dir(self, step: int) -> Path:
        return self.folder / f"{PREVIOUS_PREFIX}{step_dir_name(step)}"

    def _writing_dir(self, step: int) -> Path:
        return self.folder / f"{WRITING_PREFIX}{step_dir_name(step)}"


def _fsync_dir(folder: Path) -> None:
    """A folder's own entries are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class RemoteStorage:
    """torch brings fsspec along; the package of a protocol (s3fs, gcsfs) is the user's to install."""

    def __init__(self, address: str):
        import fsspec  # type: ignore[import-untyped]

        self.address = address.rstrip("/")
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"fsspec cannot open this address ({address}: {error})") from error

    def begin(self, step: int) -> None:
        with _as_storage_error(self.address, "written"):
            for path in self._folders():
                names = (INDEX_FILE, f"{INDEX_FILE}.left")
                if _step_of(path) is not None and not any(self._filesystem.exists(f"{path}/{name}") for name in names):
                    self._filesystem.rm(path, recursive=True)
        self.abandon(step)

    def write(self, step: int, name: str, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
        # The index is what makes it a checkpoint: it gets its name in `commit`.
        path = f"{self._writing_dir(step)}/{name}" + (".writing" if name == INDEX_FILE else "")
        wait_for_bytes(len(file))
        with _as_storage_error(path, "written"), self._filesystem.open(path, "wb") as stream:
            stream.write(file)

    def commit(self, step: int) -> None:
        place = self._writing_dir(step)
        before = next((path for path in self._final_dirs(step) if path != place and self._has_index(path)), None)
        with _as_storage_error(place, "written"):
            self._filesystem.mv(f"{place}/{INDEX_FILE}.writing", f"{place}/{INDEX_FILE}")
        if before is not None:
            self._remove(before)

    def abandon(self, step: int) -> None:
        place = self._writing_dir(step)
        with _as_storage_error(place, "removed"):
            if self._filesystem.exists(place):
                self._filesystem.rm(place, recursive=True)

    def steps(self) -> list[int]:
        with _as_storage_error(self.address, "looked for"):
            found = {_step_of(path) for path in self._folders() if self._has_index(path)}
        return sorted(step for step in found if step is not None)

    def remove(self, step: int) -> None:
        self._remove(self._existing_dir(step))

    def _remove(self, place: str) -> None:
        with _as_storage_error(place, "removed"):
            self._filesystem.rm(f"{place}/{INDEX_FILE}")
            self._filesystem.rm(place, recursive=True)

    def size(self, step: int, name: str) -> int | None:
        path = f"{self._existing_dir(step)}/{name}"
        with _as_storage_error(path, "read"):
            return int(self._filesystem.size(path)) if self._filesystem.exists(path) else None

    def set_aside(self, step: int) -> None:
        place = self._existing_dir(step)
        with _as_storage_error(place, "set aside"):
            self._filesystem.mv(f"{place}/{INDEX_FILE}", f"{place}/{INDEX_FILE}.left")

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path = f"{self._existing_dir(step)}/{name}"
        with _as_storage_error(path, "read"):
            found: list[Any] = self._filesystem.cat_ranges(
                [path] * len(ranges),
                [start for start, _ in ranges],
                [start + count for start, count in ranges],
                on_error="raise",
            )
        whole = bytearray().join(found)
        if len(whole) != sum(count for _, count in ranges):
            raise CheckpointError(f"the checkpoint is damaged ({path} ends too early)")
        return whole

    def _final_dirs(self, step: int) -> tuple[str, str]:
        place = f"{self._root}/{step_dir_name(step)}"
        return place, f"{place}{REWRITE_SUFFIX}"

    def _existing_dir(self, step: int) -> str:
        """Where a checkpoint is."""
        place, again = self._final_dirs(step)
        return place if self._has_index(place) or not self._has_index(again) else again

    def _writing_dir(self, step: int) -> str:
        """Where one is written: every rank finds the same, since none appears before all have written."""
        self._filesystem.invalidate_cache()
        place, again = self._final_dirs(step)
        return again if self._has_index(place) else place

    def _has_index(self, place: str) -> bool:
        return bool(self._filesystem.exists(f"{place}/{INDEX_FILE}"))

    def _folders(self) -> list[str]:
        if not self._filesystem.exists(self._root):
            return []
        self._filesystem.invalidate_cache()
        return [str(path).rstrip("/") for path in self._filesystem.ls(self._root, detail=False)]


def _step_of(path: str) -> int | None:
    match = STEP_DIR_PATTERN.fullmatch(path.rpartition("/")[2].removesuffix(REWRITE_SUFFIX))
    return int(match[1]) if match else None


@contextmanager
def _as_storage_error(path: str, action: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every protocol has errors of its own
        raise storage_error(error, path, action) from error


def read_index_files(storage: Storage, step: int) -> tuple[bytearray, bytearray]:
    """The index of a checkpoint and its digest, as they lie there."""
    found = []
    for name in (INDEX_FILE, DIGEST_FILE):
        size = storage.size(step, name)
        if size is None:
            raise CheckpointError(f"the checkpoint is damaged ({storage.address}/{step_dir_name(step)} has no {name})")
        found.append(storage.read(step, name, [(0, size)]))
    return found[0], found[1]
