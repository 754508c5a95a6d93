"""Deterministic kernels: the same bits in every pass.

On a GPU the backward of attention accumulates in any order by default; in our models nothing else does. Gradients of
the last layer's queries are the first to differ, and a gradient that is all rounding error (the bias of keys) differs
entirely.
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
    """Set the environment variable that cuBLAS reads before the first GEMM of a process."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use torch's deterministic kernels; raise ValueError for an operator that has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # filling memory that is overwritten anyway costs a pass over it
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
