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
from echelon.kernels.gemm.fp8_cast import SUMMED, Narrow, inverse_of, largest_of_columns, largest_of_rows, narrow
from echelon.kernels.gemm.fused_linear import Home, Kept, Product, project

NARROW, RANGE = torch.float8_e4m3fn, torch.float8_e5m2
"""more digits, more range"""
KINDS = ("fp8", "fp8-row")


class PerTensor:
    """One scale for a matrix."""

    gradient_type = RANGE

    def __init__(self, *, keeps_weights: bool = False) -> None:
        self.keeps_weights = keeps_weights
        self._version: tuple[int, int] | None = None
        """of the weight that the following are of, and its address: older versions may be at work beside the newest"""
        self._inverse: tuple[Tensor, Tensor] | None = None
        self._rows: Narrow | None = None
        self._columns: Narrow | None = None

    # -- the arithmetic of kernels/gemm/fused_linear.py --------------------------------------------------------------------------

    def takes(self, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and all(size % SUMMED == 0 for size in weight.shape)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, home: Home, *, remade: bool
    ) -> tuple[Tensor, Kept]:
        by_row, by_column = self._inverses(x, NARROW, columns=not remade)
        rows, columns = narrow(x, NARROW, rows=by_row, columns=None if remade else by_column)
        assert rows is not None
        y = _product(rows, self._weight_rows(weight, home), x.dtype)
        kept: Kept = (columns.values, columns.inverse) if columns is not None else self._beside(by_column)
        return y if bias is None else y.add_(bias), kept

    def keep(self, x: Tensor, kept: Kept) -> Kept:
        columns = narrow(x, NARROW, columns=kept[0] if kept else self._inverses(x, NARROW)[1])[1]
        assert columns is not None
        return columns.values, columns.inverse

    def backward(
        self, dy: Tensor, weight: Tensor, home: Home, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[Kept], Product]]:
        rows, columns = self._both(dy, self.gradient_type)
        dx = _product(rows, self._weight_columns(weight, home), dy.dtype) if needs_input else None

        def of_weight(kept: Kept) -> Product:
            return lambda place: _product(columns, Narrow(*kept), dy.dtype, place)

        return dx, of_weight

    # -- casts --------------------------------------------------------------------------------------------------------

    def _weight_rows(self, weight: Tensor, home: Home) -> Narrow:
        inverse = self._of_version(weight, home)[0]
        rows = self._rows or narrow(weight, NARROW, rows=inverse)[0]
        assert rows is not None
        self._rows = rows if self.keeps_weights else None
        return rows

    def _weight_columns(self, weight: Tensor, home: Home) -> Narrow:
        inverse = self._of_version(weight, home)[1]
        columns = self._columns or narrow(weight, NARROW, columns=inverse)[1]
        assert columns is not None
        self._columns = columns if self.keeps_weights else None
        return columns

    def _of_version(self, weight: Tensor, home: Home) -> tuple[Tensor, Tensor]:
        """The inverse scales of the weight as it is now. A weight without a home may change unseen."""
        version = (home.version, weight.data_ptr()) if home is not None else None
        if self._inverse is None or version is None or version != self._version:
            self._version, self._rows, self._columns = version, None, None
            self._inverse = self._inverses(weight, NARROW)
        return self._inverse

    def _both(self, x: Tensor, dtype: torch.dtype) -> tuple[Narrow, Narrow]:
        by_row, by_column = self._inverses(x, dtype)
        rows, columns = narrow(x, dtype, rows=by_row, columns=by_column)
        assert rows is not None
        assert columns is not None
        return rows, columns

    def _inverses(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        """Of x as it lies and transposed; without `columns` the second is not asked for."""
        inverse = inverse_of(largest_of_rows(x).amax(), dtype)
        return inverse, inverse

    def _beside(self, by_column: Tensor) -> Kept:
        """What is kept of an x that will be remade: the same scale then needs no second look for the largest."""
        return (by_column,)


class PerRow(PerTensor):
    """One scale for every row of a factor."""

    gradient_type = NARROW

    def _inverses(self, x: Tensor, dtype: torch.dtype, columns: bool = True) -> tuple[Tensor, Tensor]:
        by_row = inverse_of(largest_of_rows(x), dtype)[:, None]
        return by_row, inverse_of(largest_of_columns(x), dtype)[:, None] if columns else by_row

    def _beside(self, by_column: Tensor) -> Kept:
        return ()


def _product(left: Narrow, right: Narrow, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """left right^T, both with the summed dimension last."""
    inverse = right.inverse.t() if right.inverse.dim() == 2 else right.inverse
    return compat.scaled_product(left.values, right.values.t(), left.inverse, inverse, dtype, place)


OLDEST = (8, 9)
"""compute capability of the first GPUs that multiply in 8 bits"""


def check(device: torch.device, dtype: torch.dtype, kernels: str) -> None:
    """Raises where 8-bit products cannot be had."""
    if device.type != "cuda":
        raise ValueError(f"8-bit products need a GPU (device={device.type}); use precision.compute=same")
    if kernels == "plain" or not dispatch.allowed():
        raise ValueError("8-bit products need our kernels, and so Triton; use kernels=auto, or precision.compute=same")
    if dtype != torch.bfloat16:
        raise ValueError(f"8-bit products need 16-bit activations (compute type {dtype}); use dtype=bfloat16")
    if torch.cuda.get_device_capability(device) < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"this GPU has no 8-bit products ({name}; Ada and Hopper were the first with them)")


def apply(model: nn.Module, layers: Sequence[str], kind: str, *, keeps_weights: bool) -> None:
    """Lets the linear layers inside the named modules compute in 8 bits. What is outside (the head) stays as it is."""
    made = {"fp8": PerTensor, "fp8-row": PerRow}[kind]
    parts: list[Any] = [part for name in layers for part in model.get_submodule(name).modules()]
    found = [part for part in parts if hasattr(part, "arithmetic") or type(part) is nn.Linear]
    if not found:
        raise ValueError(
            f"no layer of {type(model).__name__} has a linear layer that could multiply in 8 bits "
            f"(layers: {', '.join(layers[:3]) or 'none'}); use precision.compute=same"
        )
    for part in found:
        foreign = type(part) is nn.Linear  # of a module that is not ours, which does not ask for its arithmetic
        part.arithmetic = made(keeps_weights=keeps_weights)
        if foreign:
            part.forward = MethodType(_forward, part)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return project(input, layer)
