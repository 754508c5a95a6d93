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

GEMM_ALIGNMENT = 16
"""the dimension that is summed over is padded with zeros to a multiple of this"""
MIN_AMAX = 1e-12
"""largest values below this count as this, so that zeros stay zeros"""


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in 8 bits: `values` times `inverse` is what it stands for."""

    values: Tensor
    """[rows, columns padded], of an 8-bit type"""
    inverse_scale: Tensor
    """float32: a number, or one for each row [rows, 1]"""


def pad_to_alignment(size: int) -> int:
    return -(-size // GEMM_ALIGNMENT) * GEMM_ALIGNMENT


def row_amax(x: Tensor) -> Tensor:
    """float32 [rows]; known already where the kernel that made x noted it."""
    known = tensor_metadata.read(x).row_amax
    if known is not None:
        return known
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.row_amax(x)
    return x.abs().amax(dim=1).float()


def column_amax(x: Tensor) -> Tensor:
    """float32 [columns]"""
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.column_amax(x)
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=0, dtype=torch.float32)
    return largest


def inverse_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return amax.clamp_min(MIN_AMAX) / torch.finfo(dtype).max


def cast_to_fp8(
    x: Tensor, dtype: torch.dtype, *, row_inverse: Tensor | None = None, column_inverse: Tensor | None = None
) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """x [rows, columns] as it lies, and transposed, each with the inverse scale that is given: a number or one a row.

    That of the transposed matrix is one for each column of x, [columns, 1].
    """
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        plain, turned = fp8_cast_triton.cast_to_fp8(x, dtype, row_inverse, column_inverse)
    else:
        plain = cast_to_fp8_plain(x, dtype, row_inverse) if row_inverse is not None else None
        turned = cast_to_fp8_plain(x.t(), dtype, column_inverse) if column_inverse is not None else None
    return (
        Fp8Matrix(plain, row_inverse) if plain is not None and row_inverse is not None else None,
        Fp8Matrix(turned, column_inverse) if turned is not None and column_inverse is not None else None,
    )


def cast_to_fp8_plain(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    most = torch.finfo(dtype).max
    out = torch.zeros(x.shape[0], pad_to_alignment(x.shape[1]), dtype=dtype, device=x.device)
    out[:, : x.shape[1]] = (x.float() * (1.0 / inverse)).clamp(-most, most).to(dtype)
    return out
