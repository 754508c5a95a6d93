"""Sums inside products are float32, also where the factors have 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SETTINGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def fp32_accumulation() -> Iterator[None]:
    """Inside, a product of matrices on a GPU that is summed up in parts does not add the parts in 16 bits."""
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in SETTINGS]
    for name in SETTINGS:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in zip(SETTINGS, before, strict=True):
            setattr(matmul, name, value)
