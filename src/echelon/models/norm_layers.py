"""RMSNorm, by itself and of a residual stream."""

import torch
from torch import Tensor, nn

from echelon.kernels.layers.rmsnorm import rms_norm, stream_norm
from echelon.models.model_config import EPSILON


class RMSNorm(nn.Module):
    remake = False
    """backward makes the output again instead of keeping it (memory/checkpointing/checkpoint_policy.py)"""

    def __init__(self, width: int, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon, remake=self.remake)


class StreamNorm(RMSNorm):
    """The norm of a residual stream to which something is added first: it gives both."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + delta, its norm)"""
        return stream_norm(x, delta, self.weight, self.epsilon, remake=self.remake)
