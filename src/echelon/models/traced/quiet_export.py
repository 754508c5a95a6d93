"""torch.export without what it writes next to its errors, which our refusals replace by a sentence."""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any


@contextmanager
def quiet_export() -> Iterator[None]:
    """Keep graphs and warnings of a failed export off standard error, and semaphores out of the process.

    torch runs graphs with a progress bar of tqdm, whose lock is a semaphore of the operating system. A rank that is
    ended with its pool would leave it behind, and Python warns of that.
    """
    if importlib.util.find_spec("tqdm") is not None:
        tqdm: Any = importlib.import_module("tqdm").tqdm
        if not hasattr(tqdm, "_lock"):
            tqdm.set_lock(threading.RLock())
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
