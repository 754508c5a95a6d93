"""A linear layer whose product our kernels may compute, alone or together with others that read the same input."""

from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, LinearGemms, concat_view, project


class Linear(nn.Linear):
    arithmetic: LinearGemms = PLAIN_GEMMS
    """how it multiplies (precision/fp8_linear.py)"""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self)


def project_all(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Every layer's output. Layers of a kind that reads x once for all of them (`together`) are asked together."""
    together = getattr(layers[0], "together", None)
    if together is None or any(
        type(layer) is not type(layers[0]) or compat.has_hooks_or_patched_forward(layer) for layer in layers
    ):
        return tuple(layer(x) for layer in layers)
    found: tuple[Tensor, ...] = together(x, layers)
    return found


def can_fuse_gemm(x: Tensor, *layers: nn.Module) -> bool:
    """Layers that read x can be one product: on a GPU, without biases, weights side by side.

    And nobody would miss that they are not called: no hook, no adapter in their place.
    """
    if not dispatch.use_triton(x) or not all(
        type(layer) is Linear and not compat.has_hooks_or_patched_forward(layer) for layer in layers
    ):
        return False
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    return all(linear.bias is None for linear in linears) and concat_view([one.weight for one in linears]) is not None
