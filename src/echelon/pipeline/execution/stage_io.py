"""What one link hands to the next: a tensor, or a tuple or list of tensors.

A message carries tensors alone. What held them is told beside them (`Form.holder`), so that a link is given the same
thing whether the link before it is on its own stage or on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

CONTAINERS: tuple[type, ...] = (Tensor, tuple, list)


def unpack_tensors(value: Any, layer_name: str) -> tuple[type, tuple[Tensor, ...]]:
    """(what holds them, the tensors) of what a link gave."""
    holder = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    tensors = (value,) if holder is Tensor else tuple(value) if holder else ()
    wrong = [part for part in tensors if not isinstance(part, Tensor)]
    if not tensors or wrong:
        inside = f"a {holder.__name__} with {type(wrong[0]).__name__} in it" if holder and wrong else None
        raise ValueError(
            f"a link handed on {inside or type(value).__name__} ({layer_name}), which no message carries; "
            "give a tensor or a tuple of tensors"
        )
    return holder or tuple, tensors


def pack_tensors(container: type, tensors: Sequence[Tensor]) -> Any:
    """The inverse."""
    return tensors[0] if container is Tensor else container(tensors)


class NonLeafAlias(Function):
    """The same values, not as a leaf: a link may change in place what it is given, and torch forbids that of leaves."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        # No view, which could not be changed either; but it counts changes with `x`, so that autograd notices them.
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
