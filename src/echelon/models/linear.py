"""A linear layer whose product our kernels may compute."""

from torch import Tensor, nn

from echelon.kernels.linear import SAME, Arithmetic, project


class Linear(nn.Linear):
    arithmetic: Arithmetic = SAME
    """how it multiplies (precision/fp8.py)"""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self)
