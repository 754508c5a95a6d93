"""A linear layer whose product our kernels may compute."""

from torch import Tensor, nn

from echelon.kernels.linear import project


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return project(input, self)
