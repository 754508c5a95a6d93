"""A linear whose inputs are divided over tp: each rank's product is a part of the sum."""

from __future__ import annotations

from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import PLAIN_GEMMS, LinearGemms, fused_linear
from echelon.parallel.tp.tp_collectives import RegionBoundary


class RowLinear(nn.Module):
    bias: nn.Parameter | None
    arithmetic: LinearGemms = PLAIN_GEMMS

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, boundary: RegionBoundary):
        super().__init__()
        self.weight, self.boundary = weight, boundary
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.boundary.leave(fused_linear(x, (self.weight,), (None,), self.arithmetic))
        return y if self.bias is None else y + self.bias  # after the sum: the bias is added once
