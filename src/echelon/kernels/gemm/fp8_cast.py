"""Matrices in FP8: values times a scale that maps the absolute maximum (amax) to the end of the dtype's range.

An FP8 GEMM requires both operands with the reduction dim last. The weight gradient reduces over rows where the other
two GEMMs reduce over columns, so both a matrix and its transpose are needed: one read of the matrix writes both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.kernels import tensor_metadata

GEMM_ALIGNMENT = 16
"""the reduction dim is padded with zeros to a multiple of this"""
MIN_AMAX = 1e-12
"""lower bound of amax, so that a matrix of zeros has a finite scale"""


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in FP8; it represents `values` times `inverse_scale`."""

    values: Tensor
    """[rows, padded columns], in an FP8 dtype"""
    inverse_scale: Tensor
    """float32: a scalar, or one for each row [rows, 1]"""


def pad_to_alignment(size: int) -> int:
    return -(-size // GEMM_ALIGNMENT) * GEMM_ALIGNMENT


def row_amax(x: Tensor) -> Tensor:
    """Return the absolute maximum of each row, float32 [rows]; the kernel that made x may have attached it."""
    attached = tensor_metadata.read(x).row_amax
    if attached is not None:
        return attached
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.row_amax(x)
    return x.abs().amax(dim=1).float()


def column_amax(x: Tensor) -> Tensor:
    """Return the absolute maximum of each column, float32 [columns]."""
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        return fp8_cast_triton.column_amax(x)
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=0, dtype=torch.float32)
    return amax


def inverse_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return amax.clamp_min(MIN_AMAX) / torch.finfo(dtype).max


def cast_to_fp8(
    x: Tensor, dtype: torch.dtype, *, row_inverse: Tensor | None = None, column_inverse: Tensor | None = None
) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Cast x [rows, columns] with `row_inverse`, and x transposed with `column_inverse`; either may be None.

    An inverse scale is a scalar, or one per row of the result: [rows, 1], or [columns, 1] for the transpose.
    """
    if x.is_cuda:
        from echelon.kernels.gemm import fp8_cast_triton

        plain, transposed = fp8_cast_triton.cast_to_fp8(x, dtype, row_inverse, column_inverse)
    else:
        plain = cast_to_fp8_plain(x, dtype, row_inverse) if row_inverse is not None else None
        transposed = cast_to_fp8_plain(x.t(), dtype, column_inverse) if column_inverse is not None else None
    return (
        Fp8Matrix(plain, row_inverse) if plain is not None and row_inverse is not None else None,
        Fp8Matrix(transposed, column_inverse) if transposed is not None and column_inverse is not None else None,
    )


def cast_to_fp8_plain(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    max_value = torch.finfo(dtype).max
    out = torch.zeros(x.shape[0], pad_to_alignment(x.shape[1]), dtype=dtype, device=x.device)
    out[:, : x.shape[1]] = (x.float() * (1.0 / inverse)).clamp(-max_value, max_value).to(dtype)
    return out
