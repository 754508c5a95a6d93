"""The fork server: the process that new ranks are forked from, with torch already imported.

Forking a process with torch takes 20 to 50 ms; starting one and importing torch takes seconds of a core. The server
must never initialise CUDA, because a fork of a process that did cannot use it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Final

METHOD: Final = "forkserver"
MASKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""signals that the server blocks; a rank unblocks them"""

GUARD_MODULE = "echelon.launch.parent_death"

# The last one imports torch's compiler, nearly a second; an optimizer's first step would import it in every rank.
_PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.tensor.debug")


def forkserver_context(preload: Iterable[str] = ()) -> ForkServerContext:
    """The multiprocessing context of the fork server, which starts its imports now.

    A process has one fork server; the first call determines what it imports.
    """
    context = multiprocessing.get_context(METHOD)
    is_main_thread = threading.current_thread() is threading.main_thread()
    guard = [GUARD_MODULE] if is_main_thread else []  # [Note: who ends whom] in that module
    context.set_forkserver_preload([*guard, *_PRELOADED, "echelon.launch.pool_worker", *preload])
    # Ctrl-C reaches every process of the terminal, and the server would print a traceback of its imports. A scheduler
    # may send SIGTERM to every process, and without the server the ranks could not save. The ranks inherit the mask.
    resource_tracker.ensure_running()  # started by the server, it would remove the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, MASKED_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def await_imports() -> None:
    """Wait until the server can fork, so that an interrupt while waiting leaves no half-started rank behind."""
    process = forkserver_context().Process(daemon=True)  # without a target it exits at once
    process.start()
    process.join()
    process.close()


def begin_rank() -> None:
    """Unblock signals in a new rank, and end it when the process that launched it is gone.

    The operating system's parent is the fork server, which lives as long as its forks if it was started without the
    guard. Without this, a hanging rank would outlive a killed program.
    """
    guard = sys.modules.get(GUARD_MODULE)
    if guard is not None:
        guard.end_with_server()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a process that multiprocessing started"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
