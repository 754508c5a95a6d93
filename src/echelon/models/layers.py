"""A linear layer whose product our kernels may compute, alone or together with others that read the same input."""

import torch
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, LinearGemms, concat_view, project
from echelon.kernels.layers.rmsnorm import residual_rms_norm, rms_norm
from echelon.models.model_config import NORM_EPSILON


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


class RMSNorm(nn.Module):
    recompute_output = False
    """backward makes the output again instead of keeping it (memory/checkpointing/checkpoint_policy.py)"""

    def __init__(self, width: int, epsilon: float = NORM_EPSILON) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, recompute=self.recompute_output)


class ResidualRMSNorm(RMSNorm):
    """The norm of a residual stream to which something is added first: it gives both."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + delta, its norm)"""
        return residual_rms_norm(x, delta, self.weight, self.epsilon, recompute=self.recompute_output)
