"""The end of a process: threads that a user's module leaves behind must not keep it alive."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

GRACE_S = 5.0
"""seconds that other threads have to finish when the work of the process is done"""


def end_despite_threads(status: int) -> None:
    """Let the process end with this status although a thread that is not a daemon is still running.

    The interpreter would wait for such a thread without limit.
    """
    threads = _other_threads()
    if threads:
        threading.Thread(target=_exit_after_grace, args=(status, threads), daemon=True).start()


def _other_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]


def _exit_after_grace(status: int, threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = ", ".join(thread.name for thread in threads if thread.is_alive())
    with suppress(OSError, ValueError):
        if names:
            print(f"echelon: the process ends although threads are still running ({names})", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    if names:
        os._exit(status)
