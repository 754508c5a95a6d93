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

from echelon.checkpoint.checkpoint_index import PAGE

CHUNK = 1 << 24
"""bytes given to the system at a time"""
LEAST = 1 << 20
"""bytes that are worth it"""
REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)

Buffer = bytes | memoryview
Until = Callable[[int], None]
"""waits until so many bytes of a buffer are what they will be"""


def there_already(size: int) -> None:
    pass


def write_through(path: Path, file: Buffer, until: Until = there_already) -> None:
    """All of it is on the disk when this returns."""
    view = memoryview(file).cast("B")
    opened = _Opened(path, direct=len(view) >= LEAST and np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0)
    try:
        done = 0
        while done < len(view):
            until(min(done + CHUNK, len(view)))
            done += opened.write(view, done)
        os.fsync(opened.file)
    finally:
        os.close(opened.file)


class _Opened:
    def __init__(self, path: Path, *, direct: bool):
        self._flag = getattr(os, "O_DIRECT", 0) if direct else 0
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.file = os.open(path, how | self._flag, 0o644)
        except OSError as error:
            if not self._flag or error.errno not in REFUSED:
                raise
            self._flag = 0
            self.file = os.open(path, how, 0o644)

    def write(self, view: memoryview, at: int) -> int:
        """Some bytes from there on; gives how many."""
        pages = min(len(view) - at, CHUNK) // PAGE * PAGE
        if self._flag and (at % PAGE or not pages):  # the end of the file, or a write that was cut short
            self._through_cache()
        if not self._flag:
            return os.write(self.file, view[at : at + CHUNK])
        try:
            return os.write(self.file, view[at : at + pages])
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        self._through_cache()
        return 0

    def _through_cache(self) -> None:
        import fcntl  # there is no O_DIRECT where there is no fcntl

        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~self._flag)
        self._flag = 0
