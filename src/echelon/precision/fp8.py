"""Products of linear layers in 8 bits, with scales from the values at hand (dynamic scaling).

    product          sums over   factors                         8-bit types
    y  = x W^T       inputs      x as it lies, W as it lies      e4m3, e4m3
    dx = dy W        outputs     dy as it lies, W transposed     e5m2 (per tensor) or e4m3 (per row), e4m3
    dW = dy^T x      rows        dy transposed, x transposed     the same

Of x, backward keeps the transposed 8-bit copy alone: half the bytes of the 16-bit one. Weights are cast once for each
version of them, so once a step. The largest value that sets a scale is known from the kernel that made the tensor
wherever one of ours did. Results are 16-bit, sums inside products are in 32 bits.

`PerTensor` has one scale for a matrix. `PerRow` has one for every row of each factor, which bounds the harm that one
large value does to its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon import compat
from echelon.kernels.cast import SUMMED, Narrow, inverse_of, largest_of_columns, largest_of_rows, narrow
from echelon.kernels.linear import Home, Kept, Product

NARROW, RANGE = torch.float8_e4m3fn, torch.float8_e5m2
"""more digits, more range"""
KINDS = ("fp8", "fp8-row")


@dataclass
class _Weights:
    """A weight in 8 bits, as of a version."""

    version: int
    rows: Narrow
    columns: Narrow


class PerTensor:
    """One scale for a matrix."""

    gradient_type = RANGE

    def __init__(self) -> None:
        self._cast: _Weights | None = None

    # -- the arithmetic of kernels/linear.py --------------------------------------------------------------------------

    def takes(self, weight: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and all(size % SUMMED == 0 for size in weight.shape)

    def forward(self, x: Tensor, weight: Tensor, home: Home) -> tuple[Tensor, Kept]:
        rows, columns = self._both(x, NARROW)
        return _product(rows, self._weights(weight, home).rows, x.dtype), (columns.values, columns.inverse)

    def keep(self, x: Tensor) -> Kept:
        columns = self._columns(x, NARROW)
        return columns.values, columns.inverse

    def backward(
        self, dy: Tensor, weight: Tensor, home: Home, needs_input: bool
    ) -> tuple[Tensor | None, Callable[[Kept], Product]]:
        rows, columns = self._both(dy, self.gradient_type)
        dx = _product(rows, self._weights(weight, home).columns, dy.dtype) if needs_input else None

        def of_weight(kept: Kept) -> Product:
            return lambda place: _product(columns, Narrow(*kept), dy.dtype, place)

        return dx, of_weight

    # -- casts --------------------------------------------------------------------------------------------------------

    def _weights(self, weight: Tensor, home: Home) -> _Weights:
        version = home.version if home is not None else -1
        if self._cast is None or home is None or self._cast.version != version:
            self._cast = _Weights(version, *self._both(weight, NARROW))
        return self._cast

    def _both(self, x: Tensor, dtype: torch.dtype) -> tuple[Narrow, Narrow]:
        inverse = inverse_of(largest_of_rows(x).amax(), dtype)
        rows, columns = narrow(x, dtype, rows=inverse, columns=inverse)
        assert rows is not None
        assert columns is not None
        return rows, columns

    def _columns(self, x: Tensor, dtype: torch.dtype) -> Narrow:
        columns = narrow(x, dtype, columns=inverse_of(largest_of_rows(x).amax(), dtype))[1]
        assert columns is not None
        return columns


class PerRow(PerTensor):
    """One scale for every row of a factor."""

    gradient_type = NARROW

    def _both(self, x: Tensor, dtype: torch.dtype) -> tuple[Narrow, Narrow]:
        by_row = inverse_of(largest_of_rows(x), dtype)[:, None]
        by_column = inverse_of(largest_of_columns(x), dtype)[:, None]
        rows, columns = narrow(x, dtype, rows=by_row, columns=by_column)
        assert rows is not None
        assert columns is not None
        return rows, columns

    def _columns(self, x: Tensor, dtype: torch.dtype) -> Narrow:
        columns = narrow(x, dtype, columns=inverse_of(largest_of_columns(x), dtype)[:, None])[1]
        assert columns is not None
        return columns


def _product(left: Narrow, right: Narrow, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """left right^T, both with the summed dimension last."""
    inverse = right.inverse.t() if right.inverse.dim() == 2 else right.inverse
    return compat.scaled_product(left.values, right.values.t(), left.inverse, inverse, dtype, place)


def apply(model: nn.Module, layers: Sequence[str], kind: str) -> None:
    """Lets the linear layers inside the named modules compute in 8 bits. What is outside (the head) stays as it is."""
    made = {"fp8": PerTensor, "fp8-row": PerRow}[kind]
    for name in layers:
        for module in model.get_submodule(name).modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2:
                part: Any = module
                part.arithmetic = made()
