"""The process that new ranks are forked from, with torch already imported.

Forking a process that has torch takes 20 to 50 ms; starting one and importing torch takes seconds of a core. The server
must never open a CUDA device: a fork of a process that did cannot use one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Final

METHOD: Final = "forkserver"
MASKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""signals that the server does not answer; a rank asks for them again"""

# The last one brings torch's compiler, nearly a second; an optimizer's first step would import it in every rank.
_PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.tensor.debug")


def forkserver_context(preload: Iterable[str] = ()) -> ForkServerContext:
    """The way to start ranks. The server starts its imports now, so that they are done when the first rank is wanted.

    A process has one fork server: what is imported in it is settled by the first call.
    """
    made = multiprocessing.get_context(METHOD)
    made.set_forkserver_preload([*_PRELOADED, "echelon.launch.pool_worker", *preload])
    # Ctrl-C reaches every process of the terminal, and the server would answer with a traceback out of its imports. A
    # scheduler may send SIGTERM to every process, and with the server the ranks would be lost that are to save.
    # The ranks inherit the mask.
    resource_tracker.ensure_running()  # the server starts one too, which would take the mask away again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, MASKED_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return made


def await_imports() -> None:
    """Wait until the server can fork. Who is interrupted while waiting here has left no half-started rank behind."""
    process = forkserver_context().Process(target=_do_nothing, daemon=True)
    process.start()
    process.join()
    process.close()


def _do_nothing() -> None:
    pass


def end_with_parent() -> None:
    """In a rank: end this process when the one that started it is gone.

    The fork server is the parent that the system knows, and it lives as long as its forks do. Without this, a rank
    that hangs would outlive a program that was killed.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise AssertionError("not a process that multiprocessing started")

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
