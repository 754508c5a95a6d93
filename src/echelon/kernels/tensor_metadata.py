"""Metadata that a kernel attaches to its output for the kernel that reads it next.

The metadata is an attribute of the tensor. Any other operator makes a new tensor without it, and readers work without
it: it only ever saves time or memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorMetadata:
    """What the kernel that made a tensor knows about it."""

    row_amax: Tensor | None = None
    """float32 [rows]: the largest absolute value of each row"""
    recompute: Callable[[Tensor | None], Tensor] | None = None
    """recomputes the tensor from tensors that are saved anyway, so backward need not save it. Given the tensor's
    gradient, it may compute the input gradient too, and attach that to the gradient as `input_gradient`"""
    column_sums: Tensor | None = None
    """[width]: the sum of its rows; on a gradient, that of a bias of the layer that made the tensor"""
    input_gradient: Tensor | None = None
    """on a gradient: the gradient of the producer's input, where it is computed already"""


EMPTY = TensorMetadata()


def attach(x: Tensor, metadata: TensorMetadata) -> Tensor:
    """Attach metadata to x, valid until x is modified in place."""
    holder: Any = x
    holder.echelon_metadata = (metadata, x._version)
    return x


def attach_recompute(x: Tensor, recompute: Callable[[], Tensor]) -> Tensor:
    """Attach a function that recomputes x, whatever its gradient."""
    return attach(x, TensorMetadata(recompute=lambda _gradient: recompute()))


def read(x: Tensor) -> TensorMetadata:
    """Return x's metadata; empty if there is none, or if x changed since (autograd adds gradients up in place)."""
    attached = getattr(x, "echelon_metadata", None)
    return attached[0] if attached is not None and attached[1] == x._version else EMPTY
