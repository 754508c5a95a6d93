"""A linear layer whose product our kernels may compute, alone or together with others that read the same input."""

from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import SAME, Arithmetic, project, side_by_side


class Linear(nn.Linear):
    arithmetic: Arithmetic = SAME
    """how it multiplies (precision/fp8_linear.py)"""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self)


def each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Every layer's output. Layers of a kind that reads x once for all of them (`together`) are asked together."""
    together = getattr(layers[0], "together", None)
    if together is None or any(type(layer) is not type(layers[0]) or compat.is_watched(layer) for layer in layers):
        return tuple(layer(x) for layer in layers)
    found: tuple[Tensor, ...] = together(x, layers)
    return found


def one_product(x: Tensor, *layers: nn.Module) -> bool:
    """Layers that read x can be one product: on a GPU, without biases, weights side by side.

    And nobody would miss that they are not called: no hook, no adapter in their place.
    """
    if not dispatch.fits(x) or not all(type(layer) is Linear and not compat.is_watched(layer) for layer in layers):
        return False
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    return all(linear.bias is None for linear in linears) and side_by_side([one.weight for one in linears]) is not None
