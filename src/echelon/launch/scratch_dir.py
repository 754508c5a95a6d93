"""Scratch folders in the temporary directory, and the local launcher's, where ranks leave files that it reads later.

[Note: folders of killed processes]

The owner of a scratch folder locks a file in it until it ends, however it ends. The next process that creates a scratch
folder removes those whose lock is free. The lock file gets its name after it is locked, so that a folder that is being
created is never taken for one that is abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

FAULTS_DIR = "faults"
"""its subdirectory for the state store of faults/"""
STOP_KEY = "stop wanted"
"""the key of a request to stop, in the state store"""
FOLDER_PREFIX, LOCK_FILE = "echelon-", "owner.lock"

_scratch_dir: Path | None = None


class ScratchFolder:
    """A folder in the temporary directory, removed when it is closed or its owner ends; see the note."""

    def __init__(self, purpose: str):
        remove_abandoned_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{purpose}-"))
        draft = self.path / f"{LOCK_FILE}.draft"
        lock = open(draft, "wb")  # noqa: SIM115 (held until the end)
        with suppress(OSError):  # a file system without locks: nothing can be removed there either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(self.path / LOCK_FILE)
        self.close = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove(folder: Path, lock: IO[bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def remove_abandoned_folders() -> None:
    """Remove scratch folders whose owners have ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError):  # in use, of another user, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def scratch_dir() -> Path | None:
    """The launcher's scratch directory, in a rank that `launch_ranks` started; None in any other process."""
    return _scratch_dir


def set_scratch_dir(path: Path) -> None:
    global _scratch_dir
    _scratch_dir = path


def attempt_dir(root: Path, attempt: int) -> Path:
    """The directory of one attempt; the next attempt starts with an empty one."""
    return root / f"attempt{attempt}"


def request_stop(folder: Path) -> None:
    """Request a graceful stop, in the format of faults/state_store.py."""
    (folder / FAULTS_DIR).mkdir(parents=True, exist_ok=True)
    (folder / FAULTS_DIR / f"{STOP_KEY}.txt").write_text("SIGTERM", encoding="utf-8")
