"""Kernels that give the same bits every time.

On a GPU the backward of attention adds up in any order unless it is told not to, and that is all of our own models that
does: gradients of the last layer's queries are the first to differ. Of a gradient that is 0 but for rounding (the bias
of keys) nothing is left to compare then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_cublas_workspace() -> None:
    """Before the first product of a process, when cuBLAS reads it."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Torch's deterministic kernels. An operator that has none is an error that names it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a pass over memory that is written anyway
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ValueError(
            f"a step cannot be computed twice with equal bits: {str(error).partition(', but')[0]}; set "
            "replay.tolerance=1e-2 to compare norms instead (replay.every)"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
