"""What one layer passes to the next: a tensor, or a tuple or list of tensors.

A transfer carries tensors. Its spec names their container (`TransferSpec.container`), so that a layer gets the same
value whether the layer before it is on its stage or on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

CONTAINERS: tuple[type, ...] = (Tensor, tuple, list)


def unpack_tensors(value: Any, layer_name: str) -> tuple[type, tuple[Tensor, ...]]:
    """(container, tensors) of the output of a layer."""
    container = next((container for container in CONTAINERS if isinstance(value, container)), None)
    tensors = (value,) if container is Tensor else tuple(value) if container else ()
    invalid = [part for part in tensors if not isinstance(part, Tensor)]
    if not tensors or invalid:
        content = f"a {container.__name__} with {type(invalid[0]).__name__} in it" if container and invalid else None
        raise ValueError(
            f"a layer returned {content or type(value).__name__} ({layer_name}), which cannot be sent; "
            "return a tensor or a tuple of tensors"
        )
    return container or tuple, tensors


def pack_tensors(container: type, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `unpack_tensors`."""
    return tensors[0] if container is Tensor else container(tensors)


class NonLeafAlias(Function):
    """A non-leaf alias of a leaf: a layer may change its input in place, which torch forbids for leaves."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        # Not a view, which could not be changed in place either; it shares the version counter of `x`, so that autograd
        # notices changes.
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
