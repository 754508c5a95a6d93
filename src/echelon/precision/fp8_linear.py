"""Products of linear layers in 8 bits, with scales from the values at hand (dynamic scaling).

    product          sums over   factors                         8-bit types
    y  = x W^T       inputs      x as it lies, W as it lies      e4m3, e4m3
    dx = dy W        outputs     dy as it lies, W transposed     e5m2 (per tensor) or e4m3 (per row), e4m3
    dW = dy^T x      rows        dy transposed, x transposed     the same

Of x, backward keeps the transposed 8-bit copy alone: half the bytes of the 16-bit one. A weight is cast once in a step,
as it lies for the forward pass and transposed for the backward pass: where a step has several microbatches both copies
are kept for them, and where it has one nothing is kept, as nothing would be used again. Nothing is kept either where
weights themselves are freed after use (zero=3). The largest value that sets a
scale is known from the kernel that made the tensor wherever one of ours did. Results are 16-bit, sums inside products
are in 32 bits.

`PerTensor` has one scale for a matrix. `PerRow` has one for every row of each factor, which bounds the harm that one
large value does to its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm.fp8_cast import (
    GEMM_ALIGNMENT,
    Fp8Matrix,
    cast_to_fp8,
    column_amax,
    inverse_scale_of,
    row_amax,
)
from echelon.kernels.gemm.fused_linear import ComputeGradient, GradBufferLike, SavedTensors, project

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""more digits, more range"""
FP8_RECIPES = ("fp8", "fp8-row")


class PerTensorFp8:
    """One scale for a matrix."""

    gradient_dtype = E5M2

    def __init__(self, *, cache_weights: bool = False) -> None:
        self.cache_weights = cache_weights
        self._version: tuple[int, int] | None = None
        """of the weight that the following are of, and its address: older versions may be at work beside the newest"""
        self._inverse_scales: tuple[Tensor, Tensor] | None = None
        self._rows: Fp8Matrix | None = None
        self._columns: Fp8Matrix | None = None

    # -- the arithmetic of kernels/gemm/fused_linear.py --------------------------------------------------------------------------

    def supports(self, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and all(size % GEMM_ALIGNMENT == 0 for size in weight.shape)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_buffer: GradBufferLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        by_row, by_column = self._compute_inverse_scales(x, E4M3, columns=not recomputed)
        rows, columns = cast_to_fp8(x, E4M3, row_inverse=by_row, column_inverse=None if recomputed else by_column)
        assert rows is not None
        y = _scaled_gemm(rows, self._weight_rows(weight, grad_buffer), x.dtype)
        kept: SavedTensors = (
            (columns.values, columns.inverse_scale) if columns is not None else self._saved_beside_recomputed(by_column)
        )
        return y if bias is None else y.add_(bias), kept

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        columns = cast_to_fp8(x, E4M3, column_inverse=saved[0] if saved else self._compute_inverse_scales(x, E4M3)[1])[
            1
        ]
        assert columns is not None
        return columns.values, columns.inverse_scale

    def backward(
        self, dy: Tensor, weight: Tensor, grad_buffer: GradBufferLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        rows, columns = self._cast_both(dy, self.gradient_dtype)
        dx = _scaled_gemm(rows, self._weight_columns(weight, grad_buffer), dy.dtype) if needs_input else None

        def of_weight(kept: SavedTensors) -> ComputeGradient:
            return lambda place: _scaled_gemm(columns, Fp8Matrix(*kept), dy.dtype, place)

        return dx, of_weight

    # -- casts --------------------------------------------------------------------------------------------------------

    def _weight_rows(self, weight: Tensor, home: GradBufferLike) -> Fp8Matrix:
        inverse = self._weight_inverse_scales(weight, home)[0]
        rows = self._rows or cast_to_fp8(weight, E4M3, row_inverse=inverse)[0]
        assert rows is not None
        self._rows = rows if self.cache_weights else None
        return rows

    def _weight_columns(self, weight: Tensor, home: GradBufferLike) -> Fp8Matrix:
        inverse = self._weight_inverse_scales(weight, home)[1]
        columns = self._columns or cast_to_fp8(weight, E4M3, column_inverse=inverse)[1]
        assert columns is not None
        self._columns = columns if self.cache_weights else None
        return columns

    def _weight_inverse_scales(self, weight: Tensor, home: GradBufferLike) -> tuple[Tensor, Tensor]:
        """The inverse scales of the weight as it is now. A weight without a home may change unseen."""
        version = (home.version, weight.data_ptr()) if home is not None else None
        if self._inverse_scales is None or version is None or version != self._version:
            self._version, self._rows, self._columns = version, None, None
            self._inverse_scales = self._compute_inverse_scales(weight, E4M3)
        return self._inverse_scales

    def _cast_both(self, x: Tensor, dtype: torch.dtype) -> tuple[Fp8Matrix, Fp8Matrix]:
        by_row, by_column = self._compute_inverse_scales(x, dtype)
        rows, columns = cast_to_fp8(x, dtype, row_inverse=by_row, column_inverse=by_column)
        assert rows is not None
        assert columns is not None
        return rows, columns

    def _compute_inverse_scales(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        """Of x as it lies and transposed; without `columns` the second is not asked for."""
        inverse = inverse_scale_of(row_amax(x).amax(), dtype)
        return inverse, inverse

    def _saved_beside_recomputed(self, by_column: Tensor) -> SavedTensors:
        """What is kept of an x that will be remade: the same scale then needs no second look for the largest."""
        return (by_column,)


class RowwiseFp8(PerTensorFp8):
    """One scale for every row of a factor."""

    gradient_dtype = E4M3

    def _compute_inverse_scales(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        by_row = inverse_scale_of(row_amax(x), dtype)[:, None]
        return by_row, inverse_scale_of(column_amax(x), dtype)[:, None] if columns else by_row

    def _saved_beside_recomputed(self, by_column: Tensor) -> SavedTensors:
        return ()


def _scaled_gemm(left: Fp8Matrix, right: Fp8Matrix, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """left right^T, both with the summed dimension last."""
    inverse = right.inverse_scale.t() if right.inverse_scale.dim() == 2 else right.inverse_scale
    return compat.scaled_mm(left.values, right.values.t(), left.inverse_scale, inverse, dtype, place)


MIN_CAPABILITY = (8, 9)
"""compute capability of the first GPUs that multiply in 8 bits"""


def check_fp8(device: torch.device, dtype: torch.dtype, kernels: str) -> None:
    """Raises where 8-bit products cannot be had."""
    if device.type != "cuda":
        raise ValueError(f"8-bit products need a GPU (device={device.type}); use precision.compute=same")
    if kernels == "plain" or not dispatch.triton_enabled():
        raise ValueError("8-bit products need our kernels, and so Triton; use kernels=auto, or precision.compute=same")
    if dtype != torch.bfloat16:
        raise ValueError(f"8-bit products need 16-bit activations (compute type {dtype}); use dtype=bfloat16")
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"this GPU has no 8-bit products ({name}; Ada and Hopper were the first with them)")


def apply_fp8(model: nn.Module, layers: Sequence[str], recipe: str, *, cache_weights: bool) -> None:
    """Lets the linear layers inside the named modules compute in 8 bits. What is outside (the head) stays as it is."""
    made = {"fp8": PerTensorFp8, "fp8-row": RowwiseFp8}[recipe]
    parts: list[Any] = [part for name in layers for part in model.get_submodule(name).modules()]
    found = [part for part in parts if hasattr(part, "arithmetic") or type(part) is nn.Linear]
    if not found:
        raise ValueError(
            f"no layer of {type(model).__name__} has a linear layer that could multiply in 8 bits "
            f"(layers: {', '.join(layers[:3]) or 'none'}); use precision.compute=same"
        )
    for part in found:
        foreign = type(part) is nn.Linear  # of a module that is not ours, which does not ask for its arithmetic
        part.arithmetic = made(cache_weights=cache_weights)
        if foreign:
            part.forward = MethodType(_forward, part)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return project(input, layer)
