"""Imported by the fork server alone: the server ends with the process that started it, and every rank with the server.

[Note: who ends whom]

      launcher  --starts-->  fork server  --forks-->  rank 0, rank 1, ...

The kernel sends SIGKILL to a process whose parent ends (PR_SET_PDEATHSIG, Linux). A thread in each rank that waits for
the launcher (forkserver.py) does the same elsewhere, but it cannot run in a rank that is stopped, stuck in C or holds
the GIL.

1. The signal follows the parent's thread, not its process. So the server imports this module only if the main thread
   starts it, and the server forks ranks from its main thread.
2. The launcher may end before the server asks for the signal. The server has no rank yet, and ends because its pipe to
   the launcher is closed.
3. The server may end before a new rank asks for the signal. The rank then has another parent, and exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

SERVER_PID: Final = os.getpid()
"""the process that imported this module: the fork server, also in the ranks that it forks"""
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_server() -> None:
    """End this rank with the fork server."""
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != SERVER_PID:
        os._exit(1)


end_with_parent()
