"""The process that new ranks are forked from, with torch already imported.

Forking a process that has torch takes 20 to 50 ms; starting one and importing torch takes seconds of every core. The
server itself opens no device and starts no thread, so its forks are safe to use with CUDA.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from multiprocessing.context import ForkServerContext

METHOD = "forkserver"

# The last one brings torch's compiler, nearly a second; an optimizer's first step would import it in every rank.
_PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.tensor.debug")


def context(preload: Iterable[str] = ()) -> ForkServerContext:
    """The way to start ranks. A process has one fork server: what is imported in it is settled by its first rank."""
    made = multiprocessing.get_context(METHOD)
    made.set_forkserver_preload([*_PRELOADED, "echelon.launch.rank", *preload])
    return made
