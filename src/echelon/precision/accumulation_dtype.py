"""Accumulation dtype of GEMMs: fp32, also where the operands have 16 bits.

By default cuBLAS may split a long reduction and add the partial sums in the operands' dtype, which loses small
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SETTINGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def fp32_accumulation() -> Iterator[None]:
    """Make GEMMs on a GPU add partial sums in fp32 inside this context."""
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in SETTINGS]
    for name in SETTINGS:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in zip(SETTINGS, before, strict=True):
            setattr(matmul, name, value)
