"""RMSNorm, by itself and of a residual stream."""

import torch
from torch import Tensor, nn

from echelon.kernels.layers.rmsnorm import residual_rms_norm, rms_norm
from echelon.models.model_config import NORM_EPSILON


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
