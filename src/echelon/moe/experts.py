"""Experts: feed-forward networks of one shape, of which each token passes through some."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.kernels.grouped import grouped
from echelon.kernels.swiglu import swiglu

ACTIVATIONS = ("swiglu", "gelu", "relu")


class Experts(nn.Module):
    """`up` holds what an expert reads its input with: one matrix, or gate and up side by side (swiglu)."""

    def __init__(self, num_experts: int, width: int, ffn: int, *, activation: str = "swiglu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is not one of {', '.join(ACTIVATIONS)} (activation={activation})")
        self.activation = activation
        self.up = nn.Parameter(torch.empty(num_experts, 2 if activation == "swiglu" else 1, ffn, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, ffn))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """[rows, width] from rows that come expert by expert; each expert's end at `ends` [experts] int32.

        An expert without rows takes part: its matrices are read by no product, and their gradient is 0.
        """
        h = grouped(x, self.up.flatten(1, 2), ends)
        if self.activation == "swiglu":
            h = swiglu(h)
        else:
            h = F.gelu(h, approximate="tanh") if self.activation == "gelu" else F.relu(h)
        return grouped(h, self.down, ends)

    def extra_repr(self) -> str:
        experts, _, ffn, width = self.up.shape
        return f"{experts} x ({width} -> {ffn} -> {width}), {self.activation}"
