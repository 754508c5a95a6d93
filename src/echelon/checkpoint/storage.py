"""Storage of checkpoints: a local directory, or any address that fsspec supports (`s3://…`, `memory://…`).

[Note: when a checkpoint exists]

On a local disk everything is written into `.writing-step-00000100`, flushed, and the directory is renamed atomically.
An object store has no rename; there the index is written last. In both, a directory `step-00000100` with an index is a
checkpoint, and nothing else is.

After a rollback a run writes the same step again, and the previous checkpoint must survive until the new one exists. On
a local disk it is moved to `.before-step-00000100`, which counts until a new one replaces it. In an object store the
new one is written to `step-00000100.again`, or from there back; either name counts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from echelon.checkpoint.checkpoint_index import DIGEST_FILE, INDEX_FILE, MAX_INDEX_BYTES, CheckpointError
from echelon.checkpoint.direct_io import WRITE_CHUNK_BYTES, Buffer, WaitForBytes, no_wait, write_direct
from echelon.faults.injector import on_file_write
from echelon.input_file import InputFileError, open_input

STEP_DIR_PATTERN = re.compile(r"step-(\d{8,})")
WRITING_PREFIX, PREVIOUS_PREFIX = ".writing-", ".before-"
REWRITE_SUFFIX = ".again"
_FREE_SPACE_REMEDY = (
    "; free space, keep fewer (checkpoint.keep), or set checkpoint.path. Earlier checkpoints are unchanged"
)
_PERMISSION_REMEDY = "; set checkpoint.path to a writable directory"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FREE_SPACE_REMEDY),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _PERMISSION_REMEDY),
}


def step_dir_name(step: int) -> str:
    return f"step-{step:08d}"


def storage_error(error: Exception, path: str, action: str) -> CheckpointError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    remedy = REMEDIES.get(getattr(error, "errno", None) or 0, "") if action == "written" else ""
    return CheckpointError(f"a checkpoint cannot be {action} ({path}: {reason}){remedy}")


class LocalStorage:
    """Checkpoints in a local or shared directory. Errors of all operations are CheckpointErrors with the path."""

    def __init__(self, folder: Path):
        self.folder, self.address = folder, str(folder)

    def begin(self, step: int) -> None:
        """Create an empty directory for a step's files, and remove leftovers of earlier attempts. On one rank."""
        with _storage_errors(self.address, "written", OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            # The process was killed between the two renames of `commit`, or after them.
            for previous in self.folder.glob(f"{PREVIOUS_PREFIX}*"):
                final = self.folder / previous.name.removeprefix(PREVIOUS_PREFIX)
                shutil.rmtree(previous) if final.exists() else previous.rename(final)
            for unfinished in self.folder.glob(f"{WRITING_PREFIX}*"):
                shutil.rmtree(unfinished)
            self._writing_dir(step).mkdir()

    def write(self, step: int, name: str, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
        """Write and flush a file; `wait_for_bytes` waits until this number of its first bytes is final."""
        path = self._writing_dir(step) / name
        try:
            with on_file_write(path):
                write_direct(path, file, wait_for_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"a checkpoint cannot be written ({path.parent} does not exist); all ranks must see one directory: set "
                "checkpoint.path to one on a file system that all nodes share, or to an address such as s3://..."
            ) from error
        except OSError as error:
            raise storage_error(error, str(path), "written") from error

    def commit(self, step: int) -> None:
        """Make the checkpoint exist, after all its files are written. On one rank."""
        writing, final, previous = self._writing_dir(step), self._final_dir(step), self._previous_dir(step)
        with _storage_errors(final, "written", OSError):
            _fsync_dir(writing)
            if final.exists():  # the same step again, after a rollback
                final.rename(previous)
            writing.rename(final)
            _fsync_dir(self.folder)
            shutil.rmtree(previous, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove what was written of a step."""
        shutil.rmtree(self._writing_dir(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order."""
        try:
            folders = [path for path in self.folder.iterdir() if (path / INDEX_FILE).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, self.address, "listed") from error
        names = {folder.name.removeprefix(PREVIOUS_PREFIX) for folder in folders}
        return sorted(int(match[1]) for name in names if (match := STEP_DIR_PATTERN.fullmatch(name)))

    def remove(self, step: int) -> None:
        # Renamed first, so that no reader sees half of it.
        folder, removed = self._existing_dir(step), self.folder / f"{WRITING_PREFIX}removed-{step_dir_name(step)}"
        with _storage_errors(folder, "removed", OSError):
            folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def size(self, step: int, name: str) -> int | None:
        """The size of a file in bytes; None where it does not exist."""
        path = self._existing_dir(step) / name
        with _storage_errors(path, "read", OSError), suppress(FileNotFoundError):
            return path.stat().st_size
        return None

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        """Read byte ranges (first byte, number) one after another."""
        path, data, at = self._existing_dir(step) / name, bytearray(sum(count for _, count in ranges)), 0
        view = memoryview(data)
        with _storage_errors(path, "read", OSError), _open_part(path) as file:
            for start, count in ranges:
                while count:
                    num_read = os.preadv(file.fileno(), [view[at : at + min(count, WRITE_CHUNK_BYTES)]], start)
                    if not num_read:
                        raise CheckpointError(f"the checkpoint is corrupt ({path} is truncated)")
                    at, start, count = at + num_read, start + num_read, count - num_read
        return data

    def set_aside(self, step: int) -> None:
        """Rename a checkpoint so that it no longer counts as one; its files are kept for the user."""
        folder, aside = self._existing_dir(step), self.folder / f"left-{step_dir_name(step)}"
        with _storage_errors(folder, "set aside", OSError):
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)

    def _existing_dir(self, step: int) -> Path:
        """The directory of an existing checkpoint."""
        place, before = self._final_dir(step), self._previous_dir(step)
        return before if before.exists() and not place.exists() else place

    def _final_dir(self, step: int) -> Path:
        return self.folder / step_dir_name(step)

    def _previous_dir(self, step: int) -> Path:
        return self.folder / f"{PREVIOUS_PREFIX}{step_dir_name(step)}"

    def _writing_dir(self, step: int) -> Path:
        return self.folder / f"{WRITING_PREFIX}{step_dir_name(step)}"


def _open_part(path: Path) -> BinaryIO:
    try:
        return open_input(path)
    except InputFileError as error:
        raise CheckpointError(f"the checkpoint is corrupt, or may not be read ({error})") from error


def _fsync_dir(folder: Path) -> None:
    """Flush a directory's entries to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class RemoteStorage:
    """Checkpoints in a file system of fsspec, with the operations of `LocalStorage`.

    torch depends on fsspec; the user installs the package of a protocol (s3fs, gcsfs).
    """

    def __init__(self, address: str):
        import fsspec  # type: ignore[import-untyped]

        self.address = address.rstrip("/")
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"fsspec cannot open this address ({address}: {error})") from error

    def begin(self, step: int) -> None:
        with _storage_errors(self.address, "written"):
            for path in self._folders():
                names = (INDEX_FILE, f"{INDEX_FILE}.left")
                if _step_of(path) is not None and not any(self._filesystem.exists(f"{path}/{name}") for name in names):
                    self._filesystem.rm(path, recursive=True)
        self.abandon(step)

    def write(self, step: int, name: str, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
        # The index makes it a checkpoint, so `commit` gives it its name.
        path = f"{self._writing_dir(step)}/{name}" + (".writing" if name == INDEX_FILE else "")
        wait_for_bytes(len(file))
        with _storage_errors(path, "written"), self._filesystem.open(path, "wb") as stream:
            stream.write(file)

    def commit(self, step: int) -> None:
        place = self._writing_dir(step)
        before = next((path for path in self._final_dirs(step) if path != place and self._has_index(path)), None)
        with _storage_errors(place, "written"):
            self._filesystem.mv(f"{place}/{INDEX_FILE}.writing", f"{place}/{INDEX_FILE}")
        if before is not None:
            self._remove(before)

    def abandon(self, step: int) -> None:
        place = self._writing_dir(step)
        with _storage_errors(place, "removed"):
            if self._filesystem.exists(place):
                self._filesystem.rm(place, recursive=True)

    def steps(self) -> list[int]:
        with _storage_errors(self.address, "listed"):
            steps = {_step_of(path) for path in self._folders() if self._has_index(path)}
        return sorted(step for step in steps if step is not None)

    def remove(self, step: int) -> None:
        self._remove(self._existing_dir(step))

    def _remove(self, place: str) -> None:
        with _storage_errors(place, "removed"):
            self._filesystem.rm(f"{place}/{INDEX_FILE}")
            self._filesystem.rm(place, recursive=True)

    def size(self, step: int, name: str) -> int | None:
        path = f"{self._existing_dir(step)}/{name}"
        with _storage_errors(path, "read"):
            return int(self._filesystem.size(path)) if self._filesystem.exists(path) else None

    def set_aside(self, step: int) -> None:
        place = self._existing_dir(step)
        with _storage_errors(place, "set aside"):
            self._filesystem.mv(f"{place}/{INDEX_FILE}", f"{place}/{INDEX_FILE}.left")

    def read(self, step: int, name: str, ranges: Sequence[tuple[int, int]]) -> bytearray:
        path = f"{self._existing_dir(step)}/{name}"
        with _storage_errors(path, "read"):
            starts, ends = [start for start, _ in ranges], [start + count for start, count in ranges]
            pieces: list[Any] = self._filesystem.cat_ranges([path] * len(ranges), starts, ends, on_error="raise")
        data = bytearray().join(pieces)
        if len(data) != sum(count for _, count in ranges):
            raise CheckpointError(f"the checkpoint is corrupt ({path} is truncated)")
        return data

    def _final_dirs(self, step: int) -> tuple[str, str]:
        place = f"{self._root}/{step_dir_name(step)}"
        return place, f"{place}{REWRITE_SUFFIX}"

    def _existing_dir(self, step: int) -> str:
        """The directory of an existing checkpoint."""
        place, again = self._final_dirs(step)
        return place if self._has_index(place) or not self._has_index(again) else again

    def _writing_dir(self, step: int) -> str:
        """The directory to write to: the same on every rank, since no checkpoint appears before all have written."""
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
def _storage_errors(path: Path | str, action: str, errors: type[Exception] = Exception) -> Iterator[None]:
    """Raise a storage's errors as CheckpointErrors; by default all errors, since every protocol has its own."""
    try:
        yield
    except errors as error:
        raise storage_error(error, str(path), action) from error


Storage = LocalStorage | RemoteStorage


def open_storage(address: str) -> Storage:
    if "://" in address and not address.startswith("file://"):
        return RemoteStorage(address)
    return LocalStorage(Path(address.removeprefix("file://")))


def read_index_files(storage: Storage, step: int) -> tuple[bytearray, bytearray]:
    """Read the index of a checkpoint and its digest."""
    files = []
    for name in (INDEX_FILE, DIGEST_FILE):
        size = storage.size(step, name)
        if size is None:
            raise CheckpointError(f"the checkpoint is corrupt ({storage.address}/{step_dir_name(step)} has no {name})")
        if size > MAX_INDEX_BYTES:
            where = f"{storage.address}/{step_dir_name(step)}/{name}"
            raise CheckpointError(f"the checkpoint is corrupt ({where} has {size:,} bytes); use another checkpoint")
        files.append(storage.read(step, name, [(0, size)]))
    return files[0], files[1]
