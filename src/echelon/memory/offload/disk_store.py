"""Tensors on disk: two generations per parameter group, of which one is complete at any time.

[Note: what a failure leaves]

An update writes the new generation next to the old one, and all groups switch together, when the last of them is
written. So a full disk, a short write or a dead process leaves the complete states of the previous step on disk; after
an error the files stay. Disk space is reserved at the start of a run: a disk that is too small fails before the first
step.

    FOLDER/echelon-rank0-…/blocks.3.states.0   .1   master weights, then the optimizer states, one by one
    FOLDER/echelon-rank0-…/blocks.3.part.0     .1   with `params`, the parameter shard in the compute dtype
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from echelon.memory.offload.host_worker import HostWorker

CHUNK = 1 << 26
"""bytes of one read or write"""
TRUNCATED = (
    "a file of states is truncated ({path}: {done:,} bytes of {total:,}); its states are lost, so resume from a "
    "checkpoint"
)
SHORT_WRITE = "a write to a file of states was short ({path}); the previous step's states are intact"


class DiskError(ValueError):
    """A file of states, or its disk, failed."""


class DiskStore:
    """A list of tensors in a pair of files."""

    def __init__(self, path: Path):
        self.path, self.paths = path, tuple(path.with_name(f"{path.name}.{generation}") for generation in (0, 1))
        self._files = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for name in self.paths]
        weakref.finalize(self, _close, self._files)
        self.reserved = 0
        self.committed = 0
        """the generation that survives a failure"""
        self.latest = 0
        """the last written one"""

    def reserve(self, nbytes: int) -> None:
        """Reserve bytes for each generation, or raise."""
        if nbytes <= self.reserved:
            return
        for file, path in zip(self._files, self.paths, strict=True):
            try:
                os.posix_fallocate(file, 0, nbytes)
            except OSError as error:
                raise _disk_error(error, path, nbytes) from error
        self.reserved = nbytes

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Read the last written generation."""
        self._transfer(self.latest, tensors, lambda file, view, at: os.preadv(file, [view], at), TRUNCATED)

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Write the generation that is not committed."""
        target = 1 - self.committed
        self._transfer(target, tensors, os.pwrite, SHORT_WRITE)
        self.latest = target

    def _transfer(
        self, generation: int, tensors: Sequence[Tensor], call: Callable[[int, memoryview, int], int], fault: str
    ) -> None:
        """Read or write tensors, one after another; `fault` is the error where `call` transfers nothing."""
        path, offset = self.paths[generation], 0
        for tensor in tensors:
            view, done = _as_memoryview(tensor), 0
            while done < len(view):
                try:
                    count = call(self._files[generation], view[done : done + CHUNK], offset + done)
                except OSError as error:
                    raise _disk_error(error, path, len(view)) from error
                if count == 0:
                    raise DiskError(fault.format(path=path, done=offset + done, total=offset + len(view)))
                done += count
            offset += len(view)

    def commit(self) -> None:
        """Make the last written generation the one that survives a failure."""
        self.committed = self.latest

    def roll_back(self) -> None:
        """Discard what was written since the last commit."""
        self.latest = self.committed


class DiskFolder:
    """A rank's folder of stores, with a reader and a writer thread; removed with its last user."""

    def __init__(self, folder: Path, name: str):
        """Create a new folder inside `folder`, which is created if missing."""
        is_new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
        except OSError as error:
            raise _disk_error(error, folder, 0) from error
        self.reader, self.writer = HostWorker("echelon-read"), HostWorker("echelon-write")
        self.errors: list[BaseException] = []
        """after an error the files stay"""
        self._finalizer = weakref.finalize(self, _clean, self.folder, is_new, self.errors)

    def open_store(self, name: str) -> DiskStore:
        """Open a pair of files, by a parameter group's name."""
        return DiskStore(self.folder / name)

    def close(self) -> None:
        """Finish reads and writes, and remove the files unless there was an error."""
        self.reader.stop()
        self.writer.stop()
        self._finalizer()

    def check_free_space(self, nbytes: int) -> None:
        """Raise if fewer than `nbytes` bytes are free."""
        free = _free_bytes(self.folder)
        if nbytes > free:
            raise DiskError(_disk_full_text(self.folder, nbytes, free))


def _as_memoryview(tensor: Tensor) -> memoryview:
    """Return a tensor's memory. (numpy would hold a reference that prevents freeing it.)"""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _free_bytes(path: Path) -> int:
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def _disk_error(error: OSError, path: Path, nbytes: int) -> DiskError:
    if error.errno == errno.ENOSPC:
        return DiskError(_disk_full_text(path, nbytes, _free_bytes(path.parent)))
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        return DiskError(
            f"a file of states exceeds a limit ({path}: {nbytes:,} bytes needed; {(error.strerror or '').lower()}); "
            "raise the limit of this user or process (quota, ulimit -f), or set another folder (memory.disk)"
        )
    return DiskError(f"a file of states failed ({path}: {(error.strerror or str(error)).lower()})")


def _disk_full_text(path: Path, nbytes: int, free: int) -> str:
    return (
        f"the disk is full ({path}: {nbytes:,} bytes needed, {free:,} free); free some space, set a folder on another "
        "disk (memory.disk), or offload fewer states (memory.host)"
    )


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _clean(folder: Path, is_new: bool, failed: list[BaseException]) -> None:
    if failed:
        return
    shutil.rmtree(folder, ignore_errors=True)
    if is_new:
        with suppress(OSError):  # another rank's folder may still be there
            folder.parent.rmdir()
