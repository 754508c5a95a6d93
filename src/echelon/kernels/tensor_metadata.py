"""What a kernel knows of a tensor that it made, for the kernel that reads it next.

A note is an attribute of the tensor. It is lost wherever another operator makes a new tensor of it, and whoever finds
none does without: it only ever saves time or memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorMetadata:
    row_amax: Tensor | None = None
    """float32 [rows]: the largest absolute value of each row"""
    recompute: Callable[[Tensor | None], Tensor] | None = None
    """makes the tensor again, from what is kept anyway: backward then need not keep it. Given the tensor's gradient, it
    may do its maker's backward on the way, and say so in a note on the gradient"""
    input_gradient: Tensor | None = None
    """of a gradient: the gradient of what its tensor was made of, where that is computed already"""


EMPTY = TensorMetadata()


def attach(x: Tensor, metadata: TensorMetadata) -> Tensor:
    noted: Any = x
    noted.note = (metadata, x._version)
    return x


def read(x: Tensor) -> TensorMetadata:
    """An empty note where there is none, or where the tensor was changed since (gradients may be added up in place)."""
    found = getattr(x, "note", None)
    return found[0] if found is not None and found[1] == x._version else EMPTY
