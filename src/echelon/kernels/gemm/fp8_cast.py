"""Matrices in 8 bits: values times a scale that brings the largest to the end of the type's range.

A product in 8 bits wants both factors with the dimension that is summed over last. The weight's gradient sums over
rows where the other two products sum over columns, so a matrix is needed as it lies and transposed: one reading of it
writes both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels import tensor_metadata

SUMMED = 16
"""the dimension that is summed over is padded with zeros to a multiple of this"""
SMALLEST = 1e-12
"""largest values below this count as this, so that zeros stay zeros"""


@dataclass(frozen=True)
class Narrow:
    """A matrix in 8 bits: `values` times `inverse` is what it stands for."""

    values: Tensor
    """[rows, columns padded], of an 8-bit type"""
    inverse: Tensor
    """float32: a number, or one for each row [rows, 1]"""


def padded(size: int) -> int:
    return -(-size // SUMMED) * SUMMED


def largest_of_rows(x: Tensor) -> Tensor:
    """float32 [rows]; known already where the kernel that made x noted it."""
    known = tensor_metadata.read(x).largest
    if known is not None:
        return known
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.largest_of_rows(x)
    return x.abs().amax(dim=1).float()


def largest_of_columns(x: Tensor) -> Tensor:
    """float32 [columns]"""
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.largest_of_columns(x)
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=0, dtype=torch.float32)
    return largest


def inverse_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp_min(SMALLEST) / torch.finfo(dtype).max


def narrow(
    x: Tensor, dtype: torch.dtype, *, rows: Tensor | None = None, columns: Tensor | None = None
) -> tuple[Narrow | None, Narrow | None]:
    """x [rows, columns] as it lies, and transposed, each with the inverse scale that is given: a number or one a row.

    That of the transposed matrix is one for each column of x, [columns, 1].
    """
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        plain, turned = fp8_cast_triton.narrow(x, dtype, rows, columns)
    else:
        plain = narrow_plain(x, dtype, rows) if rows is not None else None
        turned = narrow_plain(x.t(), dtype, columns) if columns is not None else None
    return (
        Narrow(plain, rows) if plain is not None and rows is not None else None,
        Narrow(turned, columns) if turned is not None and columns is not None else None,
    )


def narrow_plain(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    most = torch.finfo(dtype).max
    out = torch.zeros(x.shape[0], padded(x.shape[1]), dtype=dtype, device=x.device)
    out[:, : x.shape[1]] = (x.float() * (1.0 / inverse)).clamp(-most, most).to(dtype)
    return out
