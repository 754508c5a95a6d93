"""Tensors in files: two generations of each unit's, of which one is whole at any time.

[Note: what a failure leaves]

An update writes the new generation beside the old one, and units change over together, when the last of them is
written. So a full disk, a short write or a dead process leaves the states of the step before, whole, on disk; files
stay where they are after an error. What a run needs is reserved when it begins: a disk that is too small is found
before the first step.

    FOLDER/echelon-rank0-…/blocks.3.states.0   .1   master values, then whatever the optimizer keeps, one by one
    FOLDER/echelon-rank0-…/blocks.3.part.0     .1   with `params`, the part of the parameters in the compute type
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from echelon.memory.offload.host_worker import HostWorker

CHUNK = 1 << 26
"""bytes of one read or write"""


class DiskError(ValueError):
    """Something is wrong with a file or its disk."""


class DiskStore:
    """A list of tensors in a pair of files."""

    def __init__(self, path: Path):
        self.paths = tuple(path.with_name(f"{path.name}.{generation}") for generation in (0, 1))
        self.path = path
        self._files = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for name in self.paths]
        weakref.finalize(self, _close, self._files)
        self.reserved = 0
        self.committed = 0
        """the generation that a failure leaves"""
        self.latest = 0
        """the one that was written last"""

    def reserve(self, nbytes: int) -> None:
        """So many bytes for each generation, or an error now."""
        if nbytes <= self.reserved:
            return
        for file, path in zip(self._files, self.paths, strict=True):
            try:
                os.posix_fallocate(file, 0, nbytes)
            except OSError as error:
                raise _disk_error(error, path, nbytes) from error
        self.reserved = nbytes

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Reads the generation that was written last."""
        file, path, offset = self._files[self.latest], self.paths[self.latest], 0
        for tensor in tensors:
            view = _as_memoryview(tensor)
            done = 0
            while done < len(view):
                try:
                    count = os.preadv(file, [view[done : done + CHUNK]], offset + done)
                except OSError as error:
                    raise _disk_error(error, path, len(view)) from error
                if count == 0:
                    raise DiskError(
                        f"a file of states is shorter than what was written ({path}: {offset + done:,} bytes of "
                        f"{offset + len(view):,}); something cut it off, and what it held is lost"
                    )
                done += count
            offset += len(view)

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Writes the other generation than the kept one."""
        target = 1 - self.committed
        file, path, offset = self._files[target], self.paths[target], 0
        for tensor in tensors:
            view = _as_memoryview(tensor)
            done = 0
            while done < len(view):
                try:
                    count = os.pwrite(file, view[done : done + CHUNK], offset + done)
                except OSError as error:
                    raise _disk_error(error, path, len(view)) from error
                if count == 0:
                    raise DiskError(f"a write to a file of states ended short ({path}); the states before it are kept")
                done += count
            offset += len(view)
        self.latest = target

    def commit(self) -> None:
        """What was written last is what a failure leaves."""
        self.committed = self.latest

    def roll_back(self) -> None:
        """What was written since then does not count."""
        self.latest = self.committed


class DiskFolder:
    """A rank's folder of stores, with a thread that reads and one that writes. It goes with its last user."""

    def __init__(self, folder: Path, name: str):
        """A new folder in this one, which is made where it is not there."""
        made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
        except OSError as error:
            raise _disk_error(error, folder, 0) from error
        self.reader, self.writer = HostWorker("echelon-read"), HostWorker("echelon-write")
        self.errors: list[BaseException] = []
        """files are left where they are after an error"""
        self._finalizer = weakref.finalize(self, _clean, self.folder, made, self.errors)

    def open_store(self, name: str) -> DiskStore:
        """A pair of files, by a unit's name."""
        return DiskStore(self.folder / name)

    def close(self) -> None:
        """When everything is read and written: the files are gone, unless something went wrong."""
        self.reader.stop()
        self.writer.stop()
        self._finalizer()

    def check_free_space(self, nbytes: int) -> None:
        """There is room for so many bytes, or an error that says how many there are."""
        free = _free_bytes(self.folder)
        if nbytes > free:
            raise DiskError(_disk_full_text(self.folder, nbytes, free))


def _as_memoryview(tensor: Tensor) -> memoryview:
    """Its memory. (numpy would take it over, and then it could not be let go of.)"""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _disk_error(error: OSError, path: Path, nbytes: int) -> DiskError:
    if error.errno == errno.ENOSPC:
        return DiskError(_disk_full_text(path, nbytes, _free_bytes(path.parent)))
    if error.errno in (errno.EDQUOT, errno.EFBIG):
        return DiskError(
            f"a file of states may not be so long ({path}: {nbytes:,} bytes needed; {(error.strerror or '').lower()}); "
            "raise the limit of this user or process (quota, ulimit -f), or name another folder (memory.disk)"
        )
    return DiskError(f"a file of states cannot be used ({path}: {(error.strerror or str(error)).lower()})")


def _disk_full_text(path: Path, nbytes: int, free: int) -> str:
    return (
        f"the disk is full ({path}: {nbytes:,} bytes needed, {free:,} free); free some space, name a folder on another "
        "disk (memory.disk), or let fewer states leave the device (memory.host)"
    )


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _clean(folder: Path, made: bool, failed: list[BaseException]) -> None:
    if failed:
        return
    shutil.rmtree(folder, ignore_errors=True)
    if made:
        with suppress(OSError):  # another rank's may still be there
            folder.parent.rmdir()
