"""A linear whose inputs are divided over tp: each rank's product is a part of the sum."""

from __future__ import annotations

from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import SAME, Arithmetic, product
from echelon.parallel.tp.tp_collectives import Boundary


class RowLinear(nn.Module):
    bias: nn.Parameter | None
    arithmetic: Arithmetic = SAME

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, boundary: Boundary):
        super().__init__()
        self.weight, self.boundary = weight, boundary
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.boundary.leave(product(x, (self.weight,), (None,), self.arithmetic))
        return y if self.bias is None else y + self.bias  # after the sum: the bias is added once
