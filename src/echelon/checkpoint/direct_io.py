"""A file written to the disk past the system's cache.

A checkpoint is read only after a failure. Through the cache all of it would be copied once more, push out what training
reads from disk, and wait there until it is flushed. Written directly, the disk takes whole pages from memory that
starts at a page (staging.py). What a file system refuses to take so, goes through the cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from echelon.checkpoint.checkpoint_index import PAGE_BYTES

WRITE_CHUNK_BYTES = 1 << 24
"""bytes given to the system at a time"""
MIN_DIRECT_BYTES = 1 << 20
"""bytes that are worth it"""
UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)

Buffer = bytes | memoryview
WaitForBytes = Callable[[int], None]
"""waits until so many bytes of a buffer are what they will be"""


def no_wait(size: int) -> None:
    pass


def write_direct(path: Path, file: Buffer, wait_for_bytes: WaitForBytes = no_wait) -> None:
    """All of it is on the disk when this returns."""
    view = memoryview(file).cast("B")
    opened = _DirectFile(
        path, direct=len(view) >= MIN_DIRECT_BYTES and np.frombuffer(view, np.uint8).ctypes.data % PAGE_BYTES == 0
    )
    try:
        done = 0
        while done < len(view):
            wait_for_bytes(min(done + WRITE_CHUNK_BYTES, len(view)))
            done += opened.write(view, done)
        os.fsync(opened.file)
    finally:
        os.close(opened.file)


class _DirectFile:
    def __init__(self, path: Path, *, direct: bool):
        self._flag = getattr(os, "O_DIRECT", 0) if direct else 0
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.file = os.open(path, how | self._flag, 0o644)
        except OSError as error:
            if not self._flag or error.errno not in UNSUPPORTED_ERRNOS:
                raise
            self._flag = 0
            self.file = os.open(path, how, 0o644)

    def write(self, view: memoryview, at: int) -> int:
        """Some bytes from there on; gives how many."""
        pages = min(len(view) - at, WRITE_CHUNK_BYTES) // PAGE_BYTES * PAGE_BYTES
        if self._flag and (at % PAGE_BYTES or not pages):  # the end of the file, or a write that was cut short
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
        import fcntl  # there is no O_DIRECT where there is no fcntl

        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~self._flag)
        self._flag = 0
