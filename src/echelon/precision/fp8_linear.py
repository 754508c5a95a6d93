"""FP8 GEMMs of linear layers, with scales from the values at hand (dynamic scaling).

    GEMM             reduces over  operands                      FP8 dtypes
    y  = x W^T       inputs        x, W                          e4m3, e4m3
    dx = dy W        outputs       dy, W transposed              e5m2 (per tensor) or e4m3 (rowwise), e4m3
    dW = dy^T x      tokens        dy transposed, x transposed   the same

Of x, backward saves the transposed FP8 copy only: half the bytes of the 16-bit one. A weight is cast once per step, and
its transpose once: with several microbatches both copies are cached for them, with one microbatch neither is, and
neither is where weights are resharded after use (zero=3). The kernel that made a tensor usually attached the absolute
maximum that sets its scale. Outputs are 16-bit; the accumulation dtype is fp32.

`PerTensorFp8` has one scale per matrix. `RowwiseFp8` has one for every row of each operand, so an outlier costs
precision in its own row only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm import fp8_cast
from echelon.kernels.gemm.fp8_cast import Fp8Matrix, cast_to_fp8, inverse_scale_of
from echelon.kernels.gemm.fused_linear import ComputeGradient, GradHookLike, SavedTensors, project

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""more precision; more range"""
FP8_RECIPES = ("fp8", "fp8-row")


class PerTensorFp8:
    """FP8 GEMMs with one scale per matrix."""

    gradient_dtype = E5M2

    def __init__(self, *, cache_weights: bool = False) -> None:
        self.cache_weights = cache_weights
        self._version: tuple[int, int] | None = None
        """(version, address) of the weight whose casts are cached: asynchronous pipelines use several at once"""
        self._inverse_scales: tuple[Tensor, Tensor] | None = None
        self._rows: Fp8Matrix | None = None
        self._columns: Fp8Matrix | None = None

    # -- LinearGemms (kernels/gemm/fused_linear.py) -------------------------------------------------------------------

    def supports(self, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and all(size % fp8_cast.GEMM_ALIGNMENT == 0 for size in weight.shape)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, grad_hook: GradHookLike, *, recomputed: bool
    ) -> tuple[Tensor, SavedTensors]:
        by_row, by_column = self._compute_inverse_scales(x, E4M3, columns=not recomputed)
        rows, columns = cast_to_fp8(x, E4M3, row_inverse=by_row, column_inverse=None if recomputed else by_column)
        assert rows is not None
        y = _scaled_gemm(rows, self._weight_rows(weight, grad_hook), x.dtype)
        saved = self._saved_for_recomputed(by_column) if columns is None else (columns.values, columns.inverse_scale)
        return y if bias is None else y.add_(bias), saved

    def save_recomputed(self, x: Tensor, saved: SavedTensors) -> SavedTensors:
        by_column = saved[0] if saved else self._compute_inverse_scales(x, E4M3)[1]
        _, columns = cast_to_fp8(x, E4M3, column_inverse=by_column)
        assert columns is not None
        return columns.values, columns.inverse_scale

    def backward(
        self, dy: Tensor, weight: Tensor, grad_hook: GradHookLike, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[SavedTensors], ComputeGradient]]:
        by_row, by_column = self._compute_inverse_scales(dy, self.gradient_dtype)
        rows, columns = cast_to_fp8(dy, self.gradient_dtype, row_inverse=by_row, column_inverse=by_column)
        assert rows is not None
        assert columns is not None
        dx = _scaled_gemm(rows, self._weight_columns(weight, grad_hook), dy.dtype) if needs_input else None

        def weight_gradient(saved: SavedTensors) -> ComputeGradient:
            return lambda out: _scaled_gemm(columns, Fp8Matrix(*saved), dy.dtype, out)

        return dx, weight_gradient

    # -- casts --------------------------------------------------------------------------------------------------------

    def _weight_rows(self, weight: Tensor, grad_hook: GradHookLike) -> Fp8Matrix:
        inverse = self._weight_inverse_scales(weight, grad_hook)[0]
        rows = self._rows or cast_to_fp8(weight, E4M3, row_inverse=inverse)[0]
        assert rows is not None
        self._rows = rows if self.cache_weights else None
        return rows

    def _weight_columns(self, weight: Tensor, grad_hook: GradHookLike) -> Fp8Matrix:
        inverse = self._weight_inverse_scales(weight, grad_hook)[1]
        columns = self._columns or cast_to_fp8(weight, E4M3, column_inverse=inverse)[1]
        assert columns is not None
        self._columns = columns if self.cache_weights else None
        return columns

    def _weight_inverse_scales(self, weight: Tensor, grad_hook: GradHookLike) -> tuple[Tensor, Tensor]:
        """Return the inverse scales of the weight's current version. Without a gradient buffer versions are unknown."""
        version = (grad_hook.version, weight.data_ptr()) if grad_hook is not None else None
        if self._inverse_scales is None or version is None or version != self._version:
            self._version, self._rows, self._columns = version, None, None
            self._inverse_scales = self._compute_inverse_scales(weight, E4M3)
        return self._inverse_scales

    def _compute_inverse_scales(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        """Return the inverse scales of x and of its transpose; without `columns` the second is not needed."""
        inverse = inverse_scale_of(fp8_cast.row_amax(x).amax(), dtype)
        return inverse, inverse

    def _saved_for_recomputed(self, by_column: Tensor) -> SavedTensors:
        """Return what to save of an x that is recomputed: its scale, which saves a second pass for the maximum."""
        return (by_column,)


class RowwiseFp8(PerTensorFp8):
    """FP8 GEMMs with one scale for every row of each operand."""

    gradient_dtype = E4M3

    def _compute_inverse_scales(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        by_row = inverse_scale_of(fp8_cast.row_amax(x), dtype)[:, None]
        return by_row, inverse_scale_of(fp8_cast.column_amax(x), dtype)[:, None] if columns else by_row

    def _saved_for_recomputed(self, by_column: Tensor) -> SavedTensors:
        return ()


def _scaled_gemm(left: Fp8Matrix, right: Fp8Matrix, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return left right^T, both with the reduction dim last."""
    inverse = right.inverse_scale.t() if right.inverse_scale.dim() == 2 else right.inverse_scale
    return compat.scaled_mm(left.values, right.values.t(), left.inverse_scale, inverse, dtype, out)


MIN_CAPABILITY = (8, 9)
"""compute capability of the first GPUs with FP8 GEMMs (Ada)"""


def check_fp8(device: torch.device, dtype: torch.dtype, kernels: str) -> None:
    """Raise where FP8 GEMMs are not available."""
    if device.type != "cuda":
        raise ValueError(f"FP8 GEMMs require a GPU (device={device.type}); use precision.compute=same")
    if kernels == "plain" or not dispatch.triton_enabled():
        raise ValueError(
            "FP8 GEMMs require Triton kernels; install triton and use kernels=auto, or use precision.compute=same"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"FP8 GEMMs require bfloat16 activations (compute dtype {dtype}); use dtype=bfloat16")
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"this GPU does not support FP8 GEMMs ({name}); use Ada, Hopper or newer, or precision.compute=same"
        )


def apply_fp8(model: nn.Module, layers: Sequence[str], recipe: str, *, cache_weights: bool) -> None:
    """Make the linear layers inside the named modules compute in FP8; others (the LM head) keep their dtype."""
    recipes = {"fp8": PerTensorFp8, "fp8-row": RowwiseFp8}
    parts: list[Any] = [part for name in layers for part in model.get_submodule(name).modules()]
    linears = [part for part in parts if hasattr(part, "gemms") or _linear_class(part) is nn.Linear]
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that could compute in FP8 "
            f"(layers: {', '.join(layers[:3]) or 'none'}); use precision.compute=same"
        )
    for part in linears:
        is_plain = _linear_class(part) is nn.Linear  # of a custom model, whose forward does not read `gemms`
        part.gemms = recipes[recipe](cache_weights=cache_weights)
        if is_plain:
            part.forward = MethodType(_forward, part)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    adapter = layer._modules.get("lora")  # its two small GEMMs keep their dtype
    return project(input, layer) if adapter is None else project(input, layer) + adapter(input)


def _linear_class(layer: nn.Module) -> type:
    """The class of a layer, beneath the one that an adapter puts before it."""
    return type(layer).__bases__[-1] if "lora" in layer._modules else type(layer)
