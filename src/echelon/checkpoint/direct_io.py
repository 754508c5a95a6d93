"""Direct I/O: writing a file without the page cache.

A checkpoint is read only after a failure. The page cache would copy all of it once more, evict what training reads from
disk, and hold it until it is flushed. With O_DIRECT the disk reads full pages from page-aligned memory (staging.py).
Where a file system does not support it, the page cache is used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from echelon.checkpoint.checkpoint_index import PAGE_BYTES

WRITE_CHUNK_BYTES = 1 << 24
"""bytes per system call"""
MIN_DIRECT_BYTES = 1 << 20
"""size from which a file is written with O_DIRECT"""
UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)

Buffer = bytes | memoryview
WaitForBytes = Callable[[int], None]
"""waits until this number of bytes of a buffer is final"""


def no_wait(size: int) -> None:
    pass


def write_direct(path: Path, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
    """Write a file and flush it to the disk."""
    view = memoryview(file).cast("B")
    is_aligned = len(view) >= MIN_DIRECT_BYTES and np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES == 0
    direct_file = _DirectFile(path, direct=is_aligned)
    try:
        done = 0
        while done < len(view):
            wait_for_bytes(min(done + WRITE_CHUNK_BYTES, len(view)))
            done += direct_file.write(view, done)
        os.fsync(direct_file.file)
    finally:
        os.close(direct_file.file)


class _DirectFile:
    def __init__(self, path: Path, *, direct: bool):
        self._flag = getattr(os, "O_DIRECT", 0) if direct else 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.file = os.open(path, flags | self._flag, 0o644)
        except OSError as error:
            if not self._flag or error.errno not in UNSUPPORTED_ERRNOS:
                raise
            self._flag = 0
            self.file = os.open(path, flags, 0o644)

    def write(self, view: memoryview, at: int) -> int:
        """Write some bytes from an offset on; return their number."""
        pages = min(len(view) - at, WRITE_CHUNK_BYTES) // PAGE_BYTES * PAGE_BYTES
        if self._flag and (at % PAGE_BYTES or not pages):  # the end of the file, or after a short write
            self._disable_direct()
        if not self._flag:
            return os.write(self.file, view[at : at + WRITE_CHUNK_BYTES])
        try:
            return os.write(self.file, view[at : at + pages])
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                raise
        self._disable_direct()
        return 0

    def _disable_direct(self) -> None:
        import fcntl  # every system with O_DIRECT has fcntl

        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~self._flag)
        self._flag = 0
